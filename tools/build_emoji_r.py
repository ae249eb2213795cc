"""Build the embedded dataset emoji-r: emoji of ten open icon sets, drawn to 64 pixels and sorted into 20 classes.

The dataset is made in the spirit of ImageNet-R: one concept, many renditions, and a test set in styles that
training never shows. Every image is an icon of a published set, drawn on white; one-color sets are drawn in
black. Nothing else is done to it.

How the split is chosen. Sets by the same authors share their drawings, so they form one family and stay on one
side: noto with noto-v1, the three fluent sets, the two emojione sets; twemoji, fxemoji and streamline stand
alone. Emojione, fxemoji and streamline are the test side, because together they hold about a third of the
pictures, give every class at least 20 test pictures, cover three quite different hands (shaded color plus
its one-color cut, flat shapes with hard shadows, thick outlines), and lack the newest emoji, which so all
serve training. The training side keeps flat, shaded, three-dimensional and one-color drawings.

A few shapes (the phases of the moon) come out nearly the same in any hand. A training image that nearly
equals a test image (correlation of the gray 32-pixel versions above the limit below) is removed.

The same packages and the same versions of resvg-py, Pillow and numpy give the same bytes: `--check` rebuilds in
a temporary folder and compares. The packages are downloaded by name with `npm pack` at the pinned versions; the
manifest records the versions of the Python packages. Which emoji make up a class, how the sets spell them, and
which icons were omitted manually and why, is in `emoji_classes.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import resvg_py
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]

HERE = Path(__file__).resolve().parent
CLASS_FILE = HERE / "emoji_classes.json"
TARGET = HERE.parent / "src" / "probprompt" / "data" / "emoji_r"

SIZE = 64
COLUMNS = 12
ORDER_SEED = 2024
INK = "#000000"
BYTE_BUDGET = 2_900_000
# Below this share of visibly inked pixels a picture says nothing at 64 pixels (white drawings on white).
LEAST_INK = 0.04
NEAR_COPY = 0.97
TEST_FAMILIES = frozenset({"emojione", "fxemoji", "streamline"})
ALLOWED_LICENCES = frozenset({"MIT", "Apache-2.0", "CC-BY-4.0"})


@dataclass(frozen=True)
class IconSet:
    """One published icon set: where it comes from, whose it is, and under which terms."""

    name: str
    version: str
    digest: str
    family: str
    title: str
    authors: str
    home: str
    licence: str
    # What the package declares; it differs from the artwork's licence only where the project itself says so.
    declared: str
    credit: str

    @property
    def split(self) -> str:
        """Side of the split, which only the family decides."""
        return "test" if self.family in TEST_FAMILIES else "train"


NOTO_HOME = "https://github.com/googlefonts/noto-emoji"
FLUENT_HOME = "https://github.com/microsoft/fluentui-emoji"
EMOJIONE_HOME = "https://github.com/EmojiTwo/emojitwo"
NOTO_CREDIT = "Copyright Google Inc. Image resources of Noto Emoji are under the Apache License 2.0."
FLUENT_CREDIT = "Copyright (c) Microsoft Corporation. The MIT licence text stands below."
EMOJIONE_CREDIT = (
    "Emoji artwork is provided by [EmojiTwo](https://emojitwo.github.io/), originally released as "
    "[Emojione 2.2](https://www.emojione.com) by Ranks.com, with contributions from the EmojiTwo community."
)

SETS = (
    IconSet(
        "noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
        "noto", "Noto Emoji", "Google Inc", NOTO_HOME, "Apache-2.0", "Apache-2.0", NOTO_CREDIT,
    ),
    IconSet(
        "noto-v1", "1.2.5", "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37",
        "noto", "Noto Emoji (version 1)", "Google Inc", NOTO_HOME, "Apache-2.0", "Apache-2.0", NOTO_CREDIT,
    ),
    IconSet(
        "twemoji", "1.2.5", "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7",
        "twemoji", "Twitter Emoji (Twemoji)", "Twitter, Inc and other contributors",
        "https://github.com/jdecked/twemoji", "CC-BY-4.0", "CC-BY-4.0",
        "Copyright Twitter, Inc and other contributors. Graphics are under CC BY 4.0.",
    ),
    IconSet(
        "fluent-emoji", "1.2.7", "8044210dbf11e016d4de85f15d01a243423bd832457e7e2491df1b751c0e272b",
        "fluent", "Fluent Emoji", "Microsoft Corporation", FLUENT_HOME, "MIT", "MIT", FLUENT_CREDIT,
    ),
    IconSet(
        "fluent-emoji-flat", "1.2.6", "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
        "fluent", "Fluent Emoji Flat", "Microsoft Corporation", FLUENT_HOME, "MIT", "MIT", FLUENT_CREDIT,
    ),
    IconSet(
        "fluent-emoji-high-contrast", "1.2.6",
        "0b92d48c90d2200bd499e3cdd09a127ca6a8c8ddefd34c35eb5a1e4994012ae0",
        "fluent", "Fluent Emoji High Contrast", "Microsoft Corporation", FLUENT_HOME, "MIT", "MIT",
        FLUENT_CREDIT,
    ),
    IconSet(
        "emojione", "1.2.3", "26a14f44284407e8bcde91799388dca2bfd91dbcd55a97f425524a1c5b73610e",
        "emojione", "Emoji One (colored)", "Emoji One (Ranks.com) and the EmojiTwo community",
        EMOJIONE_HOME, "CC-BY-4.0", "CC-BY-4.0", EMOJIONE_CREDIT,
    ),
    IconSet(
        "emojione-monotone", "1.2.1", "40b90004bafb406b59266155ef9b7e1dd67bf2947fc8db8d07388776f4d0d04e",
        "emojione", "Emoji One (monotone)", "Emoji One (Ranks.com) and the EmojiTwo community",
        EMOJIONE_HOME, "CC-BY-4.0", "CC-BY-4.0", EMOJIONE_CREDIT,
    ),
    IconSet(
        "fxemoji", "1.2.2", "f3e72b3c59d05e1db03b7e308d55c0d05bd7ba3f625a90da1b79313c12858eef",
        "fxemoji", "Firefox OS Emoji (FxEmojis)", "Mozilla Foundation",
        "https://github.com/mozilla/fxemoji", "CC-BY-4.0", "Apache-2.0",
        "Copyright 2015, Mozilla Foundation. The package declares Apache-2.0, which is the project's licence "
        "for its code; the project puts its visual design under CC BY 4.0, and so do we.",
    ),
    IconSet(
        "streamline-emojis", "1.2.4", "5dac87c876b322500989828c5823143e0100d78881627a2e4081a4b897cbfdbc",
        "streamline", "Streamline Emojis", "Streamline (Webalys)",
        "https://github.com/webalys-hq/streamline-vectors", "CC-BY-4.0", "CC-BY-4.0",
        "Free vectors from [Streamline](https://streamlinehq.com).",
    ),
)  # fmt: skip

LICENCE_LINKS = {
    "MIT": "https://opensource.org/license/mit",
    "Apache-2.0": "https://www.apache.org/licenses/LICENSE-2.0",
    "CC-BY-4.0": "https://creativecommons.org/licenses/by/4.0/",
}

MIT_TEXT = """\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation
the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and
to permit persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of
the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO
THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS
IN THE SOFTWARE.
"""


class Picture(NamedTuple):
    """One drawn icon and where it belongs."""

    label: str
    emoji: str
    source: IconSet
    icon: str
    pixels: Pixels


class Dropped(NamedTuple):
    """A picture that was left out, and the reason."""

    emoji: str
    style: str
    reason: str


def fetch(source: IconSet, packages: Path) -> dict[str, Any]:
    """Return the icons of one set, from the package tarball in `packages` (fetched there when absent)."""
    tarball = packages / f"iconify-json-{source.name}-{source.version}.tgz"
    if not tarball.exists():
        wanted = f"@iconify-json/{source.name}@{source.version}"
        command = ["npm", "pack", "--silent", "--pack-destination", str(packages), wanted]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if found != source.digest:
        raise SystemExit(f"{tarball.name}: sha256 {found}, expected {source.digest}")
    with tarfile.open(tarball) as archive:
        members = {name: archive.extractfile(f"package/{name}.json") for name in ("package", "icons")}
        loaded = {name: json.load(member) for name, member in members.items() if member is not None}
    declared = loaded["package"].get("license")
    if declared != source.declared or source.licence not in ALLOWED_LICENCES:
        raise SystemExit(f"{source.name}: licence {declared!r} is not the one recorded ({source.declared})")
    icons: dict[str, Any] = loaded["icons"]
    return icons


def squeeze(name: str) -> str:
    """Reduce a name to what all sets agree on: fxemoji writes names without hyphens."""
    return name.replace("-", "").lower()


def names_of(icons: dict[str, Any]) -> dict[str, str]:
    """Return the visible names of a set, aliases included, by their squeezed form."""
    listed = [*icons["icons"], *icons.get("aliases", {})]
    return {squeeze(name): name for name in listed if not icons["icons"].get(name, {}).get("hidden")}


def find(style: str, names: dict[str, str], emoji: str, spellings: list[str]) -> list[str]:
    """Return the icons of one set that draw `emoji`; several when the set numbers its variants.

    A spelling written `set:name` is meant for that set alone and goes before the emoji's own name, since a set
    may use that name for something else (fxemoji's "cat" is a cat's face).
    """
    own = [item.split(":")[1] for item in spellings if item.startswith(f"{style}:")]
    general = [item for item in spellings if ":" not in item]
    found = [names[squeeze(item)] for item in own if squeeze(item) in names]
    for item in [emoji, *general]:
        if not found and squeeze(item) in names:
            found.append(names[squeeze(item)])
    variants = [names.get(squeeze(f"{emoji}-{number}"), "") for number in range(1, 10)]
    return found + [name for name in variants if name]


def svg(icons: dict[str, Any], name: str) -> tuple[str, bool]:
    """Return the icon as an SVG document, and whether an alias asks for it to be mirrored."""
    mirrored = False
    while name not in icons["icons"]:
        alias = icons["aliases"][name]
        mirrored ^= bool(alias.get("hFlip"))
        if set(alias) - {"parent", "hFlip"}:
            raise SystemExit(f"alias {name} asks for a change this builder does not know: {alias}")
        name = alias["parent"]
    icon = icons["icons"][name]
    left, top, width, height = (
        icon.get(key, icons.get(key, default))
        for key, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
    )
    # A square view box centred on the icon keeps the aspect of the few icons that are not square.
    side = max(width, height)
    box = f"{left - (side - width) / 2} {top - (side - height) / 2} {side} {side}"
    head = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {head} width="{side}" height="{side}" viewBox="{box}" color="{INK}">{icon["body"]}</svg>', mirrored


def draw(icons: dict[str, Any], name: str) -> Pixels:
    """Draw one icon on white, as (SIZE, SIZE, 3) bytes."""
    document, mirrored = svg(icons, name)
    data = resvg_py.svg_to_bytes(svg_string=document, width=SIZE, height=SIZE, skip_system_fonts=True)
    icon = Image.open(io.BytesIO(bytes(data))).convert("RGBA")
    canvas = Image.new("RGBA", (SIZE, SIZE), (255, 255, 255, 255))
    canvas.alpha_composite(icon)
    pixels = np.asarray(canvas.convert("RGB"))
    return pixels[:, ::-1].copy() if mirrored else pixels.copy()


def class_order(names: list[str]) -> list[str]:
    """Shuffle the classes once with a fixed seed, since runs form their tasks from consecutive classes."""
    order = sorted(names)
    random.Random(ORDER_SEED).shuffle(order)
    return order


def gather(plan: dict[str, Any], packages: Path) -> tuple[list[Picture], list[str]]:
    """Draw everything the plan names; also return the `set: emoji` pairs that a set does not hold."""
    pictures, absent = [], []
    loaded = []
    for source in SETS:
        icons = fetch(source, packages)
        loaded.append((source, icons, names_of(icons)))
    for label in class_order(list(plan["classes"])):
        for source, icons, known in loaded:
            for emoji in plan["classes"][label]:
                names = find(source.name, known, emoji, plan["spellings"].get(emoji, []))
                if not names:
                    absent.append(f"{source.name}: {emoji}")
                for name in names:
                    if f"{source.name}:{name}" not in plan["skip"]:
                        pictures.append(Picture(label, emoji, source, name, draw(icons, name)))
    return pictures, absent


def drop_blanks_and_repeats(pictures: list[Picture]) -> tuple[list[Picture], list[Dropped]]:
    """Leave out pictures with hardly any ink, and pictures equal to an earlier one to the byte."""
    kept, dropped = [], []
    seen: set[bytes] = set()
    for picture in pictures:
        ink = float((picture.pixels.min(axis=2) < 230).mean())
        data = picture.pixels.tobytes()
        reason = "blank" if ink < LEAST_INK else "repeat" if data in seen else ""
        seen.add(data)
        if reason:
            dropped.append(Dropped(picture.emoji, picture.source.name, reason))
        else:
            kept.append(picture)
    return kept, dropped


def signatures(pictures: list[Picture]) -> NDArray[np.float64]:
    """Return one centred unit vector per picture, from its grey version at half size."""
    small = [Image.fromarray(item.pixels).convert("L").resize((32, 32), Image.Resampling.BOX) for item in pictures]
    flat = np.stack([np.asarray(image, dtype=np.float64).ravel() for image in small])
    flat -= flat.mean(axis=1, keepdims=True)
    unit: NDArray[np.float64] = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    return unit


def drop_near_copies(pictures: list[Picture]) -> tuple[list[Picture], list[Dropped]]:
    """Leave out training pictures that nearly equal some test picture."""
    vectors = signatures(pictures)
    testing = np.array([item.source.split == "test" for item in pictures])
    closest = (vectors @ vectors[testing].T).max(axis=1)
    kept, dropped = [], []
    for picture, is_test, likeness in zip(pictures, testing, closest, strict=True):
        if not is_test and likeness > NEAR_COPY:
            dropped.append(Dropped(picture.emoji, picture.source.name, "near copy of a test picture"))
        else:
            kept.append(picture)
    return kept, dropped


def sheet(pictures: list[Picture]) -> Image.Image:
    """Lay pictures out row by row on one image; unused places stay white."""
    rows = -(-len(pictures) // COLUMNS)
    board = np.full((rows * SIZE, COLUMNS * SIZE, 3), 255, dtype=np.uint8)
    for place, picture in enumerate(pictures):
        top, left = place // COLUMNS * SIZE, place % COLUMNS * SIZE
        board[top : top + SIZE, left : left + SIZE] = picture.pixels
    return Image.fromarray(board)


def encode(image: Image.Image, quality: int | None) -> bytes:
    """Encode a sheet as WebP at the given quality, or without loss when there is none."""
    buffer = io.BytesIO()
    if quality is None:
        image.save(buffer, "WEBP", lossless=True, quality=100, method=6)
    else:
        image.save(buffer, "WEBP", quality=quality, method=6, use_sharp_yuv=True)
    return buffer.getvalue()


def encode_all(sheets: dict[str, Image.Image], room: int) -> tuple[int | None, dict[str, bytes]]:
    """Encode all sheets without loss if they then fit `room` bytes, else at the highest quality that does."""
    for quality in (None, *range(100, 49, -1)):
        data = {label: encode(image, quality) for label, image in sheets.items()}
        if sum(map(len, data.values())) <= room:
            return quality, data
    raise SystemExit("the sheets do not fit the size limit at any acceptable quality")


def manifest_text(head: dict[str, Any], images: list[list[Any]]) -> str:
    """Write the manifest with one image per line, so that a change shows as a small difference."""
    start = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in images)
    return f'{start},\n "images": [\n{lines}\n ]\n}}\n'


def describe(pictures: list[Picture], dropped: list[Dropped], skipped: dict[str, str]) -> dict[str, Any]:
    """Return the manifest's head, without the sheets."""
    used = [source for source in SETS if any(item.source == source for item in pictures)]
    sets = {
        source.name: {
            "package": f"@iconify-json/{source.name}", "version": source.version, "sha256": source.digest,
            "family": source.family, "split": source.split, "licence": source.licence,
            "package_licence": source.declared, "home": source.home,
        }
        for source in used
    }  # fmt: skip
    return {
        "name": "emoji-r",
        "size": SIZE,
        "columns": COLUMNS,
        "background": "white",
        "classes": list(dict.fromkeys(item.label for item in pictures)),
        "image_columns": ["label", "emoji", "style", "family", "licence", "split", "place"],
        "counts": dict(Counter(item.source.split for item in pictures)),
        "built_with": {name: version(name) for name in ("resvg_py", "pillow", "numpy")},
        "sets": sets,
        "left_out": {
            "rule": {"least_ink": LEAST_INK, "near_copy": NEAR_COPY},
            "by_hand": skipped,
            "by_rule": [f"{item.style}: {item.emoji} ({item.reason})" for item in dropped],
        },
    }


def attribution() -> str:
    """Write the credits that the licences ask for."""
    parts = [
        "# Attribution",
        "The pictures of emoji-r are icons of the sets below, taken from the `@iconify-json` packages. They stay "
        "under their own licences. What we changed, for every set: a selection of the icons was rendered to 64 px "
        "on a white background (one-color sets in black), put together on one sheet per class, and compressed "
        "as WebP. The authors do not endorse this project.",
    ]
    for source in SETS:
        parts.append(
            f"## {source.title} (`{source.name}`)\n\n"
            f"- Authors: {source.authors}\n"
            f"- Project: <{source.home}>\n"
            f"- Licence: [{source.licence}]({LICENCE_LINKS[source.licence]})\n"
            f"- Package: `@iconify-json/{source.name}` {source.version}\n"
            f"- Changes: a selection, rendered to 64 px\n"
            f"- {source.credit}"
        )
    notice = "MIT License\n\nCopyright (c) Microsoft Corporation."
    parts.append(f"## Licence text of the Fluent Emoji sets\n\n{notice}\n\n{MIT_TEXT}")
    return "\n\n".join(parts).rstrip() + "\n"


def write(target: Path, head: dict[str, Any], groups: dict[str, list[Picture]]) -> None:
    """Write sheets, manifest and credits into `target`, within the byte budget together with the reader."""
    rows = [
        [label, item.emoji, item.source.name, item.source.family, item.source.licence, item.source.split, place]
        for label, group in groups.items()
        for place, item in enumerate(group)
    ]
    credits = attribution()
    # The sheets' own entries are not known yet; 150 bytes each is more than they take.
    spent = len(manifest_text(head, rows).encode()) + len(credits.encode()) + 150 * len(groups)
    spent += sum(path.stat().st_size for path in TARGET.glob("*.py"))
    quality, sheets = encode_all({label: sheet(group) for label, group in groups.items()}, BYTE_BUDGET - spent)
    head["sheet_quality"] = "lossless" if quality is None else quality
    head["sheets"] = {f"{label}.webp": hashlib.sha256(data).hexdigest() for label, data in sheets.items()}
    target.mkdir(parents=True, exist_ok=True)
    for stale in set(target.glob("*.webp")) - {target / name for name in head["sheets"]}:
        stale.unlink()
    for label, data in sheets.items():
        (target / f"{label}.webp").write_bytes(data)
    (target / "manifest.json").write_text(manifest_text(head, rows), encoding="utf-8", newline="\n")
    (target / "ATTRIBUTION.md").write_text(credits, encoding="utf-8", newline="\n")


def build(target: Path, packages: Path) -> list[str]:
    """Write the dataset into `target` and return what there is to tell about it."""
    plan = json.loads(CLASS_FILE.read_text(encoding="utf-8"))
    drawn, absent = gather(plan, packages)
    pictures, dropped = drop_blanks_and_repeats(drawn)
    pictures, near = drop_near_copies(pictures)
    head = describe(pictures, dropped + near, plan["skip"])
    write(target, head, {label: [item for item in pictures if item.label == label] for label in head["classes"]})
    return summary(pictures, dropped + near, absent, target, head["sheet_quality"])


def summary(
    pictures: list[Picture], dropped: list[Dropped], absent: list[str], target: Path, quality: int | str
) -> list[str]:
    """Return the lines that tell what was built."""
    by_class = Counter((item.label, item.source.split) for item in pictures)
    by_style = Counter((item.source.name, item.source.split) for item in pictures)
    lines = [f"not in the set: {item}" for item in absent]
    lines += [f"left out: {item.style}: {item.emoji} ({item.reason})" for item in dropped]
    for label in dict.fromkeys(item.label for item in pictures):
        lines.append(f"class {label}: {by_class[label, 'train']} train, {by_class[label, 'test']} test")
    lines += [f"style {name} ({split}): {count}" for (name, split), count in by_style.items()]
    lines += [f"left out, {reason}: {count}" for reason, count in Counter(item.reason for item in dropped).items()]
    total = sum(path.stat().st_size for path in target.iterdir() if path.is_file())
    sides = Counter(item.source.split for item in pictures)
    counts = f"{len(pictures)} images ({sides['train']} train, {sides['test']} test)"
    lines.append(f"{counts}, quality {quality}, {total} bytes")
    return lines


def check(packages: Path) -> list[str]:
    """Rebuild in a temporary folder and return the names of files that differ from the ones in place."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        build(fresh, packages)
        names = {path.name for path in fresh.iterdir()} | {
            path.name for path in TARGET.iterdir() if path.suffix in {".webp", ".json", ".md"}
        }
        pairs = {name: (fresh / name, TARGET / name) for name in sorted(names)}
        return [
            name
            for name, (new, old) in pairs.items()
            if not (new.exists() and old.exists() and new.read_bytes() == old.read_bytes())
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="rebuild elsewhere and compare, writing nothing")
    parser.add_argument("--packages", type=Path, help="folder that holds the package tarballs, or will hold them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        packages = arguments.packages or Path(folder)
        packages.mkdir(parents=True, exist_ok=True)
        if not arguments.check:
            print("\n".join(build(TARGET, packages)))
            return 0
        different = check(packages)
    print("\n".join(f"differs: {name}" for name in different) or "the files in place are what the builder makes")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
