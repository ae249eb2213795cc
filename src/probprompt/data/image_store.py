"""Decoded images in memory: uint8, on the device if they fit, else on the host."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue
from torch import Tensor

from probprompt.data.cache import Decoded, ImageCache, decode
from probprompt.data.datasets import ImageSet
from probprompt.data.transforms import Packed, common_shape
from probprompt.errors import UserError
from probprompt.progress import ProgressCallback

Advance = Callable[[int], None]
RESIDENT = 0.4  # largest share of a GPU's free memory for one set
_CHUNK = 2**26  # bytes per transfer to the device


@dataclass(frozen=True)
class ImageStore(Packed):
    """Images on the device, or on the host in a mapped file."""

    @classmethod
    def place(
        cls,
        decoded: Decoded,
        device: torch.device,
        rows: NDArray[np.int64] | None = None,
        capacity: float | None = None,
    ) -> Self:
        """Move images (or some rows) to the device if they fit, else keep them on the host."""
        chosen = np.arange(len(decoded.sizes)) if rows is None else rows
        offsets, sizes = (torch.from_numpy(part[chosen]) for part in (decoded.offsets, decoded.sizes))
        pixels, needed = _tensor(decoded.pixels), 3 * int(sizes.prod(dim=1).sum())
        resident = needed <= (_capacity(device) if capacity is None else capacity)
        if device.type != "cpu" and resident:
            pixels, offsets = _send(pixels, offsets, sizes, needed, device)
        shape = common_shape(offsets, sizes, len(pixels))
        return cls(pixels, offsets.to(device), sizes.to(device), shape, resident)

    @property
    def bytes(self) -> int:
        """Size of the images."""
        return 3 * int(self.sizes.prod(dim=1).sum())

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pixels on the device, the offset of each image `(B,)`, and sizes `(B, 2)`."""
        offsets, sizes = self.offsets[indices], self.sizes[indices]  # (B,), (B, 2)
        if self.resident:
            return self.pixels, offsets, sizes
        places = torch.cat([offsets[:, None], sizes], dim=1).cpu()  # (B, 3), in one transfer
        pixels, starts = _gather(self.pixels, places[:, 0], places[:, 1:], self.device.type == "cuda")
        return pixels.to(self.device, non_blocking=True), starts.to(self.device, non_blocking=True), sizes

    def only(self, rows: Tensor) -> Self:
        """Copy the images of these rows, in order."""
        sizes = self.sizes[rows]  # (B, 2)
        lengths = 3 * sizes.prod(dim=1)  # (B,)
        pixels = torch.cat([self.pixels[start:end] for start, end in self._extents(rows)])
        return replace(self, pixels=pixels, offsets=lengths.cumsum(0) - lengths, sizes=sizes)

    def inverted(self, rows: Tensor) -> Self:
        """Invert the colors of the images of these rows."""
        pixels = self.pixels.clone()
        for start, end in self._extents(rows):
            pixels[start:end] = 255 - self.pixels[start:end]
        return replace(self, pixels=pixels)

    def _extents(self, rows: Tensor) -> list[tuple[int, int]]:
        starts = self.offsets[rows]
        return list(zip(starts.tolist(), (starts + 3 * self.sizes[rows].prod(dim=1)).tolist(), strict=True))


def _tensor(pixels: NDArray[np.uint8]) -> Tensor:
    """Return an array as a tensor, without torch's warning about read-only memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(pixels)


def _capacity(device: torch.device) -> float:
    return RESIDENT * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")


def _gather(pixels: Tensor, offsets: Tensor, sizes: Tensor, pinned: bool) -> tuple[Tensor, Tensor]:
    """Copy images on the host; return contiguous pixels `(bytes,)` and offsets `(B,)`."""
    lengths = 3 * sizes.prod(dim=1)  # (B,)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    copies = torch.empty(int(lengths.sum()), dtype=torch.uint8, pin_memory=pinned)
    shape = common_shape(offsets, sizes, len(pixels))
    if shape is not None:
        length = 3 * shape[0] * shape[1]
        torch.index_select(pixels.view(-1, length), 0, offsets // length, out=copies.view(-1, length))
        return copies, starts
    for start, end, offset in zip(starts.tolist(), ends.tolist(), offsets.tolist(), strict=True):
        copies[start:end] = pixels[offset : offset + end - start]
    return copies, starts


def _send(pixels: Tensor, offsets: Tensor, sizes: Tensor, total: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy images from the host to the device; return pixels and offsets."""
    lengths = 3 * sizes.prod(dim=1)  # (n,)
    starts = lengths.cumsum(0) - lengths
    sent = torch.empty(total, dtype=torch.uint8, device=device)
    chunks = torch.unique_consecutive(starts // _CHUNK, return_counts=True)[1].tolist()
    for first, places, extents in zip(starts.split(chunks), offsets.split(chunks), sizes.split(chunks), strict=True):
        part = _gather(pixels, places, extents, device.type == "cuda")[0]
        sent[int(first[0]) :][: len(part)].copy_(part, non_blocking=True)
    return sent, starts


@dataclass(frozen=True)
class Loaded:
    """A set of images in memory."""

    store: ImageStore
    labels: Tensor  # (n,)
    names: tuple[str, ...]
    unreadable: tuple[tuple[str, str], ...] = ()
    stored_side: int | None = None  # largest short side in pixels
    sha256: str | None = None  # hash of the pixels: of the whole folder if cached, of the set if it has no files

    def describe(self) -> dict[str, JsonValue]:
        """Return the description for a run's record."""
        return {
            "stored_side": self.stored_side or "full",
            "bytes": self.store.bytes,
            "resident": "host" if self.store.pixels.device.type == "cpu" else "device",
            "resident_share": RESIDENT,
            "pixels_sha256": self.sha256,
        }


def load(images: ImageSet, device: torch.device, advance: Advance, workers: int | None = None) -> Loaded:
    """Decode a set without the cache; omit and list unreadable files."""
    if images.pixels is None:
        decoded = decode(images.read, len(images), advance, workers)
    else:
        decoded = Decoded.of(images.pixels)
        advance(len(images))
    if images.files is None:  # never cached, so the hash is computed here
        decoded = decoded.hashed()
    return _chosen(images, decoded, np.arange(len(images)), device)


def load_kept(
    sets: Sequence[ImageSet],
    device: torch.device,
    progress: ProgressCallback,
    cache: ImageCache | None,
    verify: bool = False,
) -> list[Loaded]:
    """Load sets through the cache, which decodes each folder once for all sets and runs."""
    folders = {id(images.files): images.files for images in sets if images.files is not None}
    entries = {key: cache.entry(files) for key, files in folders.items()} if cache else {}
    kept = {key: entry for key, entry in entries.items() if entry is not None}
    decoded = {key: entry.read(verify) for key, entry in kept.items()}
    missing = {key: entry for key, entry in kept.items() if decoded[key] is None}
    others = [images for images in sets if id(images.files) not in missing]
    with progress.stage("reading images", sum(map(len, others)) + sum(len(entry.files) for entry in missing.values())):
        for key, entry in missing.items():
            decoded[key] = entry.write(progress.advance, progress.note)
        loaded = []
        for images in sets:
            whole = decoded.get(id(images.files))
            if whole is None or images.rows is None:
                loaded.append(load(images, device, progress.advance))
                continue
            loaded.append(_chosen(images, whole, images.rows, device))
            if id(images.files) not in missing:
                progress.advance(len(images))
    for one in loaded:
        if not one.store.resident:
            size = f"{one.store.bytes / 1e9:.1f} GB"
            progress.note(f"Kept {size} of images on the host: over {100 * RESIDENT:.0f}% of the free device memory.")
    return loaded


def _chosen(images: ImageSet, decoded: Decoded, rows: NDArray[np.int64], device: torch.device) -> Loaded:
    failed = {index: decoded.unreadable[row] for index, row in enumerate(rows.tolist()) if row in decoded.unreadable}
    kept = [index for index in range(len(images)) if index not in failed]
    return Loaded(
        store=ImageStore.place(decoded, device, rows[kept]),
        labels=torch.from_numpy(images.labels[kept]).to(device),
        names=tuple(images.names[index] for index in kept),
        unreadable=tuple((images.names[index], reason) for index, reason in failed.items()),
        stored_side=images.short_side,
        sha256=decoded.sha256,
    )


def check_readable(sets: Sequence[Loaded], class_names: Sequence[str], skip: bool) -> list[str]:
    """Raise UserError for unreadable files, or list them if ``skip`` and no class is empty."""
    unreadable = [(name, reason) for loaded in sets for name, reason in loaded.unreadable]
    if unreadable and not skip:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in unreadable[:10])
        more = f"\n  and {len(unreadable) - 10} more" if len(unreadable) > 10 else ""
        raise UserError(
            f"{len(unreadable)} unreadable image file(s):\n{lines}{more}\n"
            "Repair or remove them, or skip them with --skip-unreadable."
        )
    for loaded in sets if unreadable else ():
        empty = set(range(len(class_names))) - set(loaded.labels.tolist())
        if empty:
            raise UserError(f"No readable image in class {class_names[min(empty)]!r}. Repair its files or remove it.")
    return [name for name, _ in unreadable]
