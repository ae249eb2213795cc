"""Growth of cost with a setting: measured values, fitted exponents, and output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from probprompt.bench import measure, results
from probprompt.bench.synthetic import Scale
from probprompt.config import RunConfig, parse_config
from probprompt.errors import UserError
from probprompt.progress import ProgressCallback
from reproduction import scaling
from reproduction.scaling import AXES, Axis, Point

CPU = torch.device("cpu")
Command = Callable[..., Any]


def _config(method: str = "probprompt") -> RunConfig:
    backbone = {"name": "test_vit", "weights": "random", "image_size": 32}
    return parse_config({"method": {"name": method}, "backbone": backbone, "training": {"batch_size": 4}})


def _fit(axis: str, values: tuple[int, ...], seconds: Callable[[int], float]) -> dict[str, scaling.Exponent]:
    """Return exponents for these seconds per image in training, and half in inference."""
    points = [Point(value, 1 / seconds(value), 2 / seconds(value), memory=1000 * value) for value in values]
    return scaling.fit_exponents(AXES[axis], points)


@pytest.mark.parametrize("power", [-0.5, 0.0, 1.0, 2.3])
def test_fit_power_finds_the_exponent(power: float) -> None:
    assert scaling.fit_power([(x, 3 * x**power) for x in (1.0, 2.0, 5.0, 30.0)]) == pytest.approx(power, abs=1e-9)


@pytest.mark.parametrize(
    ("axis", "values", "seconds", "exponent"),
    [
        ("components", (5, 10, 20, 40), lambda value: value**1.5, 1.5),
        ("batch", (8, 16, 32), lambda value: 0.5, 1.0),  # a batch is paid as a whole
        ("batch", (8, 16, 32), lambda value: 0.5 * value, 2.0),
        ("image-size", (32, 64, 128), lambda value: value**2, 1.0),  # a size counts by its pixels
        ("image-size", (32, 64, 128), lambda value: value**4, 2.0),
    ],
)
def test_every_cost_is_fitted(axis: str, values: tuple[int, ...], seconds: Any, exponent: float) -> None:
    fitted = _fit(axis, values, seconds)
    assert set(fitted) == {"training_s", "inference_s", "memory"}
    assert fitted["training_s"].whole == pytest.approx(exponent) == pytest.approx(fitted["inference_s"].whole)
    assert fitted["training_s"].worse_than_linear == (exponent > 1) and not fitted["memory"].worse_than_linear


def test_a_fixed_cost_does_not_hide_the_end() -> None:
    fitted = _fit("classes", (100, 300, 1000, 3000, 10_000), lambda value: 10 + (value / 1000) ** 3)["training_s"]
    assert fitted.whole < 1 < scaling.WORSE < fitted.end and fitted.worse_than_linear


def test_what_was_not_measured_is_not_fitted() -> None:
    points = [Point(5, 4.0, 8.0), Point(10, None, 4.0, note="out of memory"), Point(20, 1.0, 2.0)]
    fitted = scaling.fit_exponents(AXES["tokens"], points)
    assert fitted["training_s"].whole == pytest.approx(1.0) and set(fitted) == {"training_s", "inference_s"}


def test_only_one_setting_changes() -> None:
    base = _config("coda-prompt")
    tokens, scale = scaling.variant(AXES["tokens"], 64, base)
    assert scale is None and tokens.method.model_dump() == {**base.method.model_dump(), "tokens": 64}
    assert tokens.model_dump(exclude={"method"}) == base.model_dump(exclude={"method"})
    assert scaling.variant(AXES["components"], 7, base)[0].method.model_dump()["components_per_task"] == 7
    assert scaling.variant(AXES["batch"], 9, base)[0].training.batch_size == 9
    assert scaling.variant(AXES["image-size"], 64, base)[0].backbone.image_size == 64
    assert scaling.variant(AXES["tasks"], 100, base) == (base, Scale((2,) * 100))
    assert scaling.variant(AXES["classes"], 100, base) == (base, Scale((10,) * 10))


def test_axes_and_values_are_those_of_the_method() -> None:
    assert [axis.name for axis in scaling.find_axes(["all"], _config())] == list(AXES)
    assert "samples" not in [axis.name for axis in scaling.find_axes(["all", "batch"], _config("coda-prompt"))]
    assert scaling.values_of(AXES["image-size"], _config(), CPU) == (16, 32, 48, 64), "whole patches"
    with pytest.raises(UserError, match="'tasks'"):
        scaling.find_axes(["task"], _config())
    with pytest.raises(UserError, match="coda-prompt has no setting samples"):
        scaling.find_axes(["samples"], _config("coda-prompt"))


@pytest.mark.parametrize(
    ("axis", "seconds", "closed"),
    [("classes", 0.1, [True, True, False]), ("tasks", 1.0, [True] * 3), ("batch", 1.0, [False] * 3)],
)
def test_ends_of_tasks_are_measured_only_if_quick(
    axis: str, seconds: float, closed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def point(axis: Axis, value: int, *rest: Any) -> Point:
        asked.append(rest[-1])
        return Point(value, closing_s=seconds if rest[-1] else None)

    monkeypatch.setattr(scaling, "measure_point", point)
    scaling.measure_curve(Axis(axis, axis, (20, 60, 2000)), _config(), CPU, 0.002, ProgressCallback())
    assert asked[:3] == closed


def test_curves_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    axis = Axis("classes", "classes", (20, 40))
    curve: Any = scaling.measure_curve(axis, _config(), CPU, 0.002, ProgressCallback())
    assert [point["value"] for point in curve["points"]] == [20, 40]
    for point in curve["points"]:
        assert min(point["training_images_per_s"], point["inference_images_per_s"], point["closing_s"]) > 0
    assert curve["points"][1]["memory"] > curve["points"][0]["memory"]
    assert set(curve["exponents"]) == set(scaling.COSTS)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(measure, "training", fail)
    assert scaling.measure_point(axis, 20, _config(), CPU, 0.002, False) == Point(20, note="out of memory")


QUICK = ("--backbone", "test_vit", "--seconds", 0.01, "--device", "cpu", "--set", "training.batch_size=2")


def test_growth_is_drawn_and_compared(reproduction: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "SMALL_BATCHES", (2, 8))
    monkeypatch.setattr(scaling, "SIZES", (1.0, 2.0))
    first, second, page = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "page.md"
    small = (*QUICK, "--set", "backbone.image_size=32")
    answer = reproduction("scaling", "batch", "image-size", *small, "--out", first, "--plot", tmp_path / "1.png")
    assert answer.code == 0, answer.err
    assert "batch: probprompt on test_vit" in answer.out and "memory in training: exponent" in answer.out
    grown = results.read_record(first)["growth"]
    assert [curve["axis"] for curve in grown] == ["batch", "image-size"]
    assert 0 < grown[0]["exponents"]["memory"]["whole"] < 1.1
    answer = reproduction("scaling", "batch", *small, "--out", second, "--compare-to", first)
    assert answer.code == 0 and "batch growing: training" in answer.out

    def point(axis: Axis, value: int, *_: object) -> Point:
        return Point(value, 1 / value**2, 1.0, 1000)

    monkeypatch.setattr(scaling, "measure_point", point)
    answer = reproduction("scaling", "samples", *QUICK, "--out", second)
    assert "training: exponent 2.00, at the end 2.00  WORSE THAN LINEAR" in answer.out
    assert answer.out.count("WORSE THAN LINEAR") == 1
    answer = reproduction("pages", second, first, "--plot", tmp_path / "growth.png", "--page", page)
    assert answer.code == 0 and "](growth.png)" in page.read_text(encoding="utf-8")
    for name in ("1.png", "growth.png"):
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    text = page.read_text(encoding="utf-8")
    assert text.index("| samples N_s") < text.index("| batch"), "in the order of the axes"


def test_growing_settings_are_compared_where_both_were_measured() -> None:
    def grown(*speeds: float | None) -> Any:
        points = [
            {"value": 2**place, "training_images_per_s": speed, "inference_images_per_s": None}
            for place, speed in enumerate(speeds)
        ]
        curve: Any = {"axis": "batch", "method": "apt", "points": points}
        return results.make_record([], [curve], {}, torch.device("cpu"), 1.0)

    (found,) = scaling.curve_ratios(grown(1.0, 2.0, None), grown(2.0, 16.0, 7.0))
    assert found.ratio == pytest.approx(4.0)  # the geometric mean of 2 and 8
