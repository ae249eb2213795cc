"""Photographs as people have them: rotated, palette, grey, transparent, CMYK, 16-bit, broken."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from probprompt.data.images import UnreadableImageError, read_image


def _red_left(width: int = 40, height: int = 20) -> Image.Image:
    """Red on the left half, blue on the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = 255
    pixels[:, width // 2 :, 2] = 255
    return Image.fromarray(pixels)


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise to see it upright
    _red_left().save(tmp_path / "a.jpg", exif=exif, quality=95)
    pixels = read_image(tmp_path / "a.jpg")
    assert pixels.shape == (40, 20, 3)
    assert pixels[5, 10, 0] > 200 and pixels[35, 10, 2] > 200


@pytest.mark.parametrize("mode", ["P", "L", "1", "CMYK", "CMYK as JPEG", "RGBA", "LA", "YCbCr"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    suffix = {"CMYK": "tif", "YCbCr": "tif", "CMYK as JPEG": "jpg"}.get(mode, "png")
    _red_left().convert(mode.split()[0]).save(tmp_path / f"a.{suffix}", quality=95)
    pixels = read_image(tmp_path / f"a.{suffix}")
    assert pixels.shape == (20, 40, 3) and pixels.dtype == np.uint8
    if mode not in ("L", "1", "LA"):
        assert np.abs(pixels.astype(int) - np.asarray(_red_left()).astype(int)).mean() < (8 if suffix == "jpg" else 4)


def test_transparency_lies_on_white(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (read_image(tmp_path / "a.png") == 255).all()
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([10, 20, 30] + [0] * 765)
    palette.save(tmp_path / "b.gif", transparency=0)
    assert (read_image(tmp_path / "b.gif") == 255).all()


def test_sixteen_bit_grey_is_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    assert np.abs(read_image(tmp_path / "a.png")[..., 0] - ramp / 257).max() <= 1


def test_short_side_is_reduced_never_enlarged(tmp_path: Path) -> None:
    _red_left(80, 40).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", 20).shape == (20, 40, 3)
    assert read_image(tmp_path / "a.png", 400).shape == (40, 80, 3)


def test_broken_files_are_unreadable(tmp_path: Path) -> None:
    _red_left().save(tmp_path / "whole.png")
    data = (tmp_path / "whole.png").read_bytes()
    for name, content in (("cut.png", data[: len(data) // 2]), ("text.jpg", b"not an image"), ("empty.png", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnreadableImageError):
            read_image(tmp_path / name)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _red_left(200, 100).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 15_000)  # beyond it a warning, beyond twice that an error
    with pytest.raises(UnreadableImageError):
        read_image(tmp_path / "a.png")
