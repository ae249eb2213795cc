"""Images on the device: decoded once, before training starts, and held there as uint8 where they fit."""

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
RESIDENT = 0.4  # the share of a GPU's free memory that a set may fill; a larger one stays on the host
_CHUNK = 2**26  # bytes that go to the device at a time


@dataclass(frozen=True)
class ImageStore(Packed):
    """Images on the device, or on the host (a mapped file)."""

    @classmethod
    def place(
        cls,
        decoded: Decoded,
        device: torch.device,
        rows: NDArray[np.int64] | None = None,
        room: float | None = None,
    ) -> Self:
        """Move images (or some rows of them) to the device if they fit, else leave them on the host."""
        chosen = np.arange(len(decoded.sizes)) if rows is None else rows
        offsets, sizes = (torch.from_numpy(part[chosen]) for part in (decoded.offsets, decoded.sizes))
        return cls._put(_tensor(decoded.pixels), offsets, sizes, device, _room(device) if room is None else room)

    @classmethod
    def _put(cls, pixels: Tensor, offsets: Tensor, sizes: Tensor, device: torch.device, limit: float) -> Self:
        needed = 3 * int(sizes.prod(dim=1).sum())
        if device.type != "cpu" and needed <= limit:
            pixels, offsets = _send(pixels, offsets, sizes, needed, device)
        shape = common_shape(offsets, sizes, len(pixels))
        return cls(pixels, offsets.to(device), sizes.to(device), shape, needed <= limit)

    @property
    def bytes(self) -> int:
        """Size of the images."""
        return 3 * int(self.sizes.prod(dim=1).sum())

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pixels on the device, the start of each image in them (B,), and sizes (B, 2)."""
        offsets, sizes = self.offsets[indices], self.sizes[indices]  # (B,), (B, 2)
        if self.resident:
            return self.pixels, offsets, sizes
        places = torch.cat([offsets[:, None], sizes], dim=1).cpu()  # (B, 3), in one transfer
        pixels, starts = _gather(self.pixels, places[:, 0], places[:, 1:], self.device.type == "cuda")
        return pixels.to(self.device, non_blocking=True), starts.to(self.device, non_blocking=True), sizes

    def only(self, rows: Tensor) -> Self:
        """Copy some of the images, in this order."""
        sizes = self.sizes[rows]  # (B, 2)
        lengths = 3 * sizes.prod(dim=1)  # (B,)
        pixels = torch.cat([self.pixels[start:end] for start, end in self._extents(rows)])
        return replace(self, pixels=pixels, offsets=lengths.cumsum(0) - lengths, sizes=sizes)

    def inverted(self, rows: Tensor) -> Self:
        """Replace these images by their negatives."""
        pixels = self.pixels.clone()
        for start, end in self._extents(rows):
            pixels[start:end] = 255 - self.pixels[start:end]
        return replace(self, pixels=pixels)

    def _extents(self, rows: Tensor) -> list[tuple[int, int]]:
        starts = self.offsets[rows]
        return list(zip(starts.tolist(), (starts + 3 * self.sizes[rows].prod(dim=1)).tolist(), strict=True))


def _tensor(pixels: NDArray[np.uint8]) -> Tensor:
    """Return the same bytes as a tensor, without the warning about read-only files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(pixels)


def _room(device: torch.device) -> float:
    return RESIDENT * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")


def _gather(pixels: Tensor, offsets: Tensor, sizes: Tensor, pinned: bool) -> tuple[Tensor, Tensor]:
    """Copy images of the host one after the other; return pixels (bytes,) and starts (B,)."""
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
    """Copy images of the host to the device one after the other; return pixels and starts."""
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
    """A set in memory."""

    store: ImageStore
    labels: Tensor  # (n,)
    names: tuple[str, ...]
    unreadable: tuple[tuple[str, str], ...] = ()
    stored_side: int | None = None
    """Largest short side."""
    sha256: str | None = None
    """Of the pixels: of all files of the folder if they are cached, of the set if it has no files."""

    def describe(self) -> dict[str, JsonValue]:
        """Return what a record states of the images."""
        return {
            "stored_side": self.stored_side or "full",
            "bytes": self.store.bytes,
            "resident": "host" if self.store.pixels.device.type == "cpu" else "device",
            "resident_share": RESIDENT,
            "pixels_sha256": self.sha256,
        }


def load(images: ImageSet, device: torch.device, advance: Advance, workers: int | None = None) -> Loaded:
    """Decode a set without the cache; unreadable files are omitted and listed."""
    if images.pixels is None:
        decoded = decode(images.read, len(images), advance, workers)
    else:
        decoded = Decoded.of(images.pixels)
        advance(len(images))
    if images.files is None:  # no cache will ever tell
        decoded = decoded.hashed()
    return _chosen(images, decoded, np.arange(len(images)), device)


def load_kept(
    sets: Sequence[ImageSet],
    device: torch.device,
    watch: ProgressCallback,
    cache: ImageCache | None,
    verify: bool = False,
) -> list[Loaded]:
    """Load sets through the cache: each folder is decoded completely, once for all sets and later runs."""
    folders = {id(images.files): images.files for images in sets if images.files is not None}
    entries = {key: cache.entry(files) for key, files in folders.items()} if cache else {}
    kept = {key: entry for key, entry in entries.items() if entry is not None}
    decoded = {key: entry.read(verify) for key, entry in kept.items()}
    missing = {key: entry for key, entry in kept.items() if decoded[key] is None}
    others = [images for images in sets if id(images.files) not in missing]
    with watch.stage("reading images", sum(map(len, others)) + sum(len(entry.files) for entry in missing.values())):
        for key, entry in missing.items():
            decoded[key] = entry.write(watch.advance, watch.note)
        loaded = []
        for images in sets:
            whole = decoded.get(id(images.files))
            if whole is None or images.rows is None:
                loaded.append(load(images, device, watch.advance))
                continue
            loaded.append(_chosen(images, whole, images.rows, device))
            if id(images.files) not in missing:
                watch.advance(len(images))
    for one in loaded:
        if not one.store.resident:
            watch.note(
                f"{one.store.bytes / 1e9:.1f} GB of images stay on the host: they are more than {100 * RESIDENT:.0f} % "
                "of the free memory of the device"
            )
    return loaded


def _chosen(images: ImageSet, decoded: Decoded, rows: NDArray[np.int64], device: torch.device) -> Loaded:
    """Select a set from decoded images by its rows."""
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


def refuse_unreadable(sets: Sequence[Loaded], class_names: Sequence[str], skip: bool) -> list[str]:
    """Reject unreadable files, or list them if they may be skipped; no class may lose its last image."""
    unreadable = [(name, reason) for loaded in sets for name, reason in loaded.unreadable]
    if unreadable and not skip:
        shown = "\n".join(f"  {name}: {reason}" for name, reason in unreadable[:10])
        more = f"\n  and {len(unreadable) - 10} more" if len(unreadable) > 10 else ""
        raise UserError(
            f"{len(unreadable)} image file(s) cannot be read:\n{shown}{more}\n"
            "Repair or remove them, or go on without them with --skip-unreadable."
        )
    for loaded in sets if unreadable else ():
        empty = set(range(len(class_names))) - set(loaded.labels.tolist())
        if empty:
            raise UserError(f"without its unreadable files the class {class_names[min(empty)]!r} has no image left")
    return [name for name, _ in unreadable]
