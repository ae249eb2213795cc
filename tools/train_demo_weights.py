"""Train the small embedded "demo" backbone from scratch on Tiny-ImageNet.

The result is a vision transformer of 3.6 M parameters for 64-pixel images, small enough to ship in the
package (7.2 MB as fp16).  One modern GPU trains it in minutes: the images stay and are augmented there.

    python tools/train_demo_weights.py --data tiny-imagenet-200 --out demo-run --minutes 8

`--data` is the extracted data set (`train/<wnid>/images/*.JPEG`, `val/images/*.JPEG` and
`val/val_annotations.txt`), or the same packed: `<split>-<k>.data.bin` (the JPEG files one after another),
`<split>-<k>.offsets.npy` (where each begins, and the end) and `<split>-<k>.labels.npy`, for k = 0, 1, ...

`--out` receives demo.safetensors (the backbone), head.safetensors (the 200-class head, not shipped),
demo.json (the training record) and log.jsonl (of the embedded weights: results/demo-weights.log.jsonl).  They
are rewritten at intervals, so an interrupted run leaves usable weights.  The last weights are kept, not those that
happen to score best on the validation images.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import json
import math
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import timm
import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

SIZE, CLASSES = 64, 200
SHAPE: dict[str, Any] = {"img_size": SIZE, "patch_size": 8, "embed_dim": 192, "depth": 8, "num_heads": 3}
START = time.monotonic()  # the time budget covers decoding and compilation too


@dataclass(frozen=True)
class Recipe:
    """Everything about the optimisation that the training record repeats."""

    batch: int = 1024
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.05
    calm_share: float = 0.15  # the last part of training, over which the augmentation weakens ...
    calm_strength: float = 0.4  # ... to this, so that the weights settle on images like those seen in use
    drop_path: float = 0.1
    label_smoothing: float = 0.1
    mix_prob: float = 0.7
    erase_prob: float = 0.25
    min_crop_area: float = 0.25
    ema_decay: float = 0.999
    clip_norm: float = 1.0


def list_split(root: Path, split: str) -> list[tuple[Path, int]]:
    """List an extracted data set; a class's label is its rank among the sorted names."""
    label = {p.name: k for k, p in enumerate(sorted((root / "train").iterdir()))}
    if split == "train":
        return [(p, label[p.parts[-3]]) for p in sorted((root / "train").glob("*/images/*.JPEG"))]
    rows = [line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    return sorted((root / "val" / "images" / row[0], label[row[1]]) for row in rows)


def read_packed(root: Path, split: str) -> tuple[list[bytes], list[int]]:
    blobs: list[bytes] = []
    labels: list[int] = []
    for path in sorted(root.glob(f"{split}-*.data.bin")):
        stem, data = path.name.removesuffix(".data.bin"), path.read_bytes()
        ends = np.load(root / f"{stem}.offsets.npy").tolist()
        blobs += [data[a:b] for a, b in pairwise(ends)]
        labels += np.load(root / f"{stem}.labels.npy").tolist()
    return blobs, labels


def read_split(root: Path, split: str) -> tuple[list[bytes], list[int]]:
    if any(root.glob(f"{split}-*.data.bin")):
        return read_packed(root, split)
    files = list_split(root, split)
    return [p.read_bytes() for p, _ in files], [k for _, k in files]


def decode(blobs: list[bytes]) -> npt.NDArray[np.uint8]:
    """Decode JPEG files to one array of shape (n, 3, SIZE, SIZE); the few grey ones become RGB."""
    images = [np.asarray(Image.open(io.BytesIO(b)).convert("RGB")) for b in blobs]
    return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))


def load_split(root: Path, split: str, limit: int | None) -> tuple[Tensor, Tensor]:
    blobs, labels = read_split(root, split)
    if not blobs:
        raise SystemExit(f"no {split} images under {root}")
    step = max(1, len(blobs) // limit) if limit else 1  # a stride keeps every class in a small trial
    blobs, labels = blobs[::step], labels[::step]
    chunks = [blobs[k : k + 1000] for k in range(0, len(blobs), 1000)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        images = np.concatenate(list(pool.map(decode, chunks)))
    return torch.from_numpy(images), torch.tensor(labels)


def uniform(like: Tensor, low: float | Tensor = 0.0, high: float | Tensor = 1.0) -> Tensor:
    """Draw one number per image, shaped to broadcast over its pixels."""
    return low + (high - low) * torch.rand(len(like), 1, 1, 1, device=like.device)


def random_view(x: Tensor, strength: Tensor, min_area: float) -> Tensor:
    """Crop, stretch, flip, turn and shear, all in one resampling."""
    area = 1 - (1 - min_area) * strength * uniform(x)
    ratio = torch.exp(uniform(x, -0.29, 0.29))  # 3:4 to 4:3
    w, h = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    flip = torch.where(uniform(x) < 0.5, -1.0, 1.0)
    angle = torch.where(uniform(x) < 0.4 * strength, uniform(x, -0.4, 0.4), 0.0)
    shear = torch.where(uniform(x) < 0.4 * strength, uniform(x, -0.3, 0.3), 0.0)
    cos, sin = angle.cos(), angle.sin()
    top = torch.cat([w * cos * flip, w * (shear * cos - sin), uniform(x, -1, 1) * (1 - w)], 3)
    bottom = torch.cat([h * sin * flip, h * (shear * sin + cos), uniform(x, -1, 1) * (1 - h)], 3)
    grid = F.affine_grid(torch.cat([top, bottom], 2).squeeze(1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def grey(x: Tensor) -> Tensor:
    return (0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]).expand_as(x)


def jitter_colour(x: Tensor) -> Tensor:
    x = x * uniform(x, 0.6, 1.4)
    middle = x.mean((1, 2, 3), keepdim=True)
    x = middle + (x - middle) * uniform(x, 0.6, 1.4)
    g = grey(x)
    return (g + (x - g) * uniform(x, 0.4, 1.6)).clamp(0, 1)


def restyle(x: Tensor, strength: Tensor) -> Tensor:
    """Redraw some images without colour or texture: the features are to serve drawings too."""
    blurred = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    g = grey(x)
    outline = F.max_pool2d(g, 3, 1, 1) + F.max_pool2d(-g, 3, 1, 1)  # brightest minus darkest neighbour
    levels = uniform(x, 2, 6).floor()
    manners = [
        g,
        torch.where(x > uniform(x, 0.3, 0.9), 1 - x, x),
        blurred,
        (blurred * levels).round() / levels,
        2 * x - blurred,
        1 - outline * uniform(x, 1, 3),
    ]
    pick = uniform(x) / (0.07 * strength)  # each manner with probability 0.07 at full strength
    for k, styled in enumerate(manners):
        x = torch.where((pick >= k) & (pick < k + 1), styled, x)
    return x.clamp(0, 1)


def random_box(x: Tensor, area: Tensor) -> Tensor:
    """Return a 0/1 mask of one box per image; its centre is uniform, so it may be cut off at the border."""
    half = 0.5 * area.sqrt()
    line = (torch.arange(SIZE, device=x.device) + 0.5) / SIZE
    across = (line.view(1, 1, 1, -1) - uniform(x)).abs() < half
    down = (line.view(1, 1, -1, 1) - uniform(x)).abs() < half
    return (across & down).float()


def augment(raw: Tensor, strength: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Turn uint8 images into normalised ones; also return how much of each is its neighbour in the batch."""
    x = random_view(raw.float() / 255, strength, recipe.min_crop_area)
    x = restyle(jitter_colour(x), strength)
    erase = random_box(x, uniform(x, 0.02, 0.25)) * (uniform(x) < recipe.erase_prob * strength)
    x = torch.where(erase > 0, torch.rand(len(x), 3, 1, 1, device=x.device), x)
    share = uniform(x)
    mask = torch.where(uniform(x) < 0.5, random_box(x, share), share)  # CutMix or mixup
    mask = mask * (uniform(x) < recipe.mix_prob * strength)
    x = x + mask * (x.roll(1, 0) - x)  # the batch is shuffled, so the neighbour is a random partner
    return 2 * x - 1, mask.expand(-1, 1, SIZE, SIZE).mean((1, 2, 3))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Keep weight decay off the biases, norms, class token and position embedding."""
    named = dict(model.named_parameters())
    decayed = [p for n, p in named.items() if n.endswith("weight") and p.ndim > 1]
    rest = [p for n, p in named.items() if not (n.endswith("weight") and p.ndim > 1)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


class Trainer:
    """The model, its moving average and one optimisation step."""

    def __init__(self, images: Tensor, labels: Tensor, recipe: Recipe) -> None:
        self.images, self.labels, self.recipe = images, labels, recipe
        self.device = images.device
        self.model = VisionTransformer(**SHAPE, num_classes=CLASSES, drop_path_rate=recipe.drop_path)
        self.model.to(self.device)
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        groups = parameter_groups(self.model, recipe.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, fused=self.device.type == "cuda")
        self.augment: Callable[..., tuple[Tensor, Tensor]] = augment
        self.loss: Callable[[Tensor, Tensor, Tensor], Tensor] = self.mixed_loss
        self.pair = tuple(self.average.parameters()), tuple(self.model.parameters())
        self.compiled = "off"

    def mixed_loss(self, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(x)
        smooth = self.recipe.label_smoothing
        own = F.cross_entropy(logits.float(), y, reduction="none", label_smoothing=smooth)
        other = F.cross_entropy(logits.float(), y.roll(1), reduction="none", label_smoothing=smooth)
        return (own + share * (other - own)).mean()

    def step(self, index: Tensor, lr: float, strength: Tensor) -> Tensor:
        # Nothing here waits for the device: the host runs ahead and the GPU is never idle.
        x, share = self.augment(self.images[index], strength, self.recipe)
        loss = self.loss(x, self.labels[index], share)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(self.pair[0], self.pair[1], 1 - self.recipe.ema_decay)
        return loss.detach()

    def rehearse(self, steps: int) -> float:
        """Take steps of size zero, which do not change the weights, and return the seconds of one."""
        index = torch.randint(len(self.images), (self.recipe.batch,), device=self.device)
        strength = torch.ones((), device=self.device)
        begin = 0.0
        for k in range(steps + 3):  # the first ones compile
            loss = self.step(index, 0.0, strength)
            if k in (2, steps + 2):
                loss.item()  # waits for the device
                begin, seconds = time.monotonic(), time.monotonic() - begin
        self.optimizer.state.clear()
        return seconds / steps

    def compile(self, mode: str) -> None:
        """Compile the step; where that fails, go on without, since a slow run is better than none."""
        plain = self.augment, self.loss
        for attempt in dict.fromkeys([mode, "default"]) if mode != "off" else []:
            try:
                self.augment = torch.compile(plain[0], dynamic=False)
                self.loss = torch.compile(plain[1], mode=attempt, dynamic=False)
                self.rehearse(1)
                self.compiled = attempt
                return
            except Exception as error:  # noqa: BLE001 (a compiler may raise anything)
                print(f"compile mode {attempt!r} failed, falling back: {str(error)[:500]}", flush=True)
                self.augment, self.loss = plain
                self.optimizer.state.clear()
                self.optimizer.zero_grad()

    def epoch(self, number: int, epochs: int) -> tuple[float, float]:
        """Train on every image once; return the mean loss and the last learning rate."""
        r, steps = self.recipe, len(self.images) // self.recipe.batch
        order = torch.randperm(len(self.images), device=self.device)
        calm = max(0.0, (number / epochs - (1 - r.calm_share)) / r.calm_share)
        strength = torch.tensor(1 - (1 - r.calm_strength) * calm, device=self.device)
        total, lr = torch.zeros((), device=self.device), 0.0
        for k in range(steps):
            done = (number * steps + k + 1) / (epochs * steps)
            cosine = 0.5 * (1 + math.cos(math.pi * max(0.0, done - r.warmup_share) / (1 - r.warmup_share)))
            lr = r.lr * min(done / r.warmup_share, cosine)
            total += self.step(order[k * r.batch : (k + 1) * r.batch], lr, strength)
        return total.item() / steps, lr


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Measure in fp32 on plain images, scaled to -1 ... 1."""
    top5 = [model(part.float() / 127.5 - 1).topk(5).indices for part in torch.split(images, 1000)]
    hits = torch.cat(top5) == labels[:, None]
    top1, best5 = hits[:, 0].float().mean().item(), hits.any(1).float().mean().item()
    return {"top1": round(100 * top1, 2), "top5": round(100 * best5, 2)}


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file, then rename it, so that an interrupted save keeps the previous version."""
    scratch = path.with_suffix(path.suffix + ".part")
    write(scratch)
    scratch.replace(path)


def save(out: Path, trainer: Trainer, val: tuple[Tensor, Tensor], record: dict[str, Any]) -> dict[str, float]:
    """Write the averaged weights as fp16, and the record with the accuracy of these rounded weights."""
    half = {n: p.half().contiguous().cpu() for n, p in trainer.average.state_dict().items()}
    rounded = copy.deepcopy(trainer.average)
    rounded.load_state_dict(half)
    scores = accuracy(rounded, *val)
    head = {n: p for n, p in half.items() if n.startswith("head.")}
    body = {n: p for n, p in half.items() if n not in head}
    replace_file(out / "demo.safetensors", lambda p: save_file(body, p, metadata={"format": "pt"}))
    replace_file(out / "head.safetensors", lambda p: save_file(head, p, metadata={"format": "pt"}))
    digest = hashlib.sha256((out / "demo.safetensors").read_bytes()).hexdigest()
    full = {**record, "validation": {"images": len(val[0]), **scores}, "sha256": digest}
    replace_file(out / "demo.json", lambda p: p.write_text(json.dumps(full, indent=2) + "\n"))
    return scores


def describe(trainer: Trainer, seed: int) -> dict[str, Any]:
    """Return the part of the training record that is known before training."""
    body = [p for n, p in trainer.model.named_parameters() if not n.startswith("head.")]
    python, cuda = platform.python_version(), trainer.device.type == "cuda"
    return {
        "model": "timm.models.vision_transformer.VisionTransformer",
        "architecture": {**SHAPE, "mlp_ratio": 4.0, "global_pool": "token", "num_classes": 0},
        "parameters": sum(p.numel() for p in body),
        "preprocessing": {"image_size": SIZE, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3},
        "dataset": {"name": "Tiny-ImageNet", "classes": CLASSES, "train_images": len(trainer.images)},
        "recipe": {"optimizer": "AdamW", "schedule": "cosine", "precision": "bf16", **asdict(trainer.recipe)},
        "hardware": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": {"python": python, "torch": torch.__version__, "timm": timm.__version__},
        "compile": trainer.compiled,
        "seed": seed,
    }


def plan_epochs(args: argparse.Namespace, trainer: Trainer) -> int:
    """Fix the number of epochs so that the schedule ends inside the budget at this device's speed."""
    if args.epochs:
        return int(args.epochs)
    steps = len(trainer.images) // trainer.recipe.batch
    seconds = trainer.rehearse(min(100, steps)) * steps
    left = 60 * args.minutes - (time.monotonic() - START) - 5  # 5 s for the last measurement
    return max(1, int(left / (1.04 * seconds)))  # 4 % for shuffling, saving and the device growing warm


def train(args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    splits = [load_split(args.data, split, args.limit) for split in ("train", "val")]  # forks, so before CUDA
    train_set, val = [(images.to(device), labels.to(device)) for images, labels in splits]
    print(f"decoded {len(train_set[0])} images, {time.monotonic() - START:.0f} s", flush=True)
    trainer = Trainer(*train_set, Recipe(batch=args.batch, lr=args.lr))
    trainer.compile(args.compile if device.type == "cuda" else "off")
    epochs = plan_epochs(args, trainer)
    record = {**describe(trainer, args.seed), "epochs": epochs}
    print(f"compile {trainer.compiled}, {epochs} epochs, {time.monotonic() - START:.0f} s", flush=True)
    torch.manual_seed(args.seed)  # the rehearsal drew random numbers; from here on only the seed counts
    begin = time.monotonic()
    with (args.out / "log.jsonl").open("w", buffering=1) as log:
        for number in range(epochs):
            loss, lr = trainer.epoch(number, epochs)
            wall = time.monotonic() - begin
            speed = (number + 1) * (len(trainer.images) // args.batch) * args.batch / wall
            row = {"epoch": number + 1, "loss": round(loss, 4), "lr": lr, "wall_s": round(wall, 1)}
            record |= {"epochs_done": number + 1, "train_loss": row["loss"], "wall_s": row["wall_s"]}
            record |= {"images_per_s": round(speed)}
            if (number + 1) % args.save_every == 0 or number + 1 == epochs:
                row |= save(args.out, trainer, val, record)
                print(f"{row}, {speed:.0f} images/s", flush=True)
            log.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="extracted or packed data set")
    parser.add_argument("--out", type=Path, required=True)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="choose the epochs so that all ends within this time")
    length.add_argument("--epochs", type=int)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="use about this many images only, as a trial")
    parser.add_argument("--save-every", type=int, default=10, help="epochs between two savings")
    modes = ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "off"]
    parser.add_argument("--compile", choices=modes, default="default", help="torch.compile mode (CUDA only)")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
