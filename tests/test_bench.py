"""What the benchmark measures, counts and writes."""

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from probprompt import methods
from probprompt.backbones.pretrained import load_backbone
from probprompt.bench import measure, results, synthetic, timing
from probprompt.bench.synthetic import BenchSetup, Scale
from probprompt.cli.cmd_bench import bench_config
from probprompt.config import BackboneConfig, RunConfig, parse_config
from probprompt.errors import UserError
from probprompt.kernels.cuda_graphs import SWITCH
from probprompt.prompts import ClassTokenShift, Prefix, Prompts, Readout, Tokens
from probprompt.storage import with_hash

TINY = {"name": "test_vit", "weights": "random", "image_size": 32}
CPU = torch.device("cpu")
Command = Callable[..., Any]
PEAK: timing.Peak = {"flops": 1e9, "size": 512, "precision": "fp32"}


def config(named: str = "probprompt", **groups: dict[str, Any]) -> RunConfig:
    base: dict[str, Any] = {
        "method": {"name": named},
        "backbone": TINY,
        "training": {"batch_size": 4},
        "data": {"tasks": [3, 2, 3]},
    }
    return parse_config({name: {**base.get(name, {}), **groups.get(name, {})} for name in {**base, **groups}})


def build(named: str = "probprompt", **groups: dict[str, Any]) -> BenchSetup:
    return synthetic.build(config(named, **groups), CPU)


# Operations -----------------------------------------------------------------------------------------------------


def counted(work: Callable[[], Any]) -> int:
    """What PyTorch itself counts, with attention as plain products: a fused one is counted with what it repeats."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work()
    return int(counter.get_total_flops())


def prefix(length: int, width: int = 64) -> Prefix:
    return Prefix(torch.ones(1, length, width), torch.ones(1, length, width))


def products(model: Any, prefixes: dict[int, int], learns: bool = False) -> tuple[int, int]:
    """Operations of a pass and of its backward pass, from the shape of a timm model and the lengths of prefixes."""
    width, hidden, tokens = model.embed_dim, model.blocks[0].mlp.fc1.out_features, model.pos_embed.shape[1]
    embedding = 2 * model.patch_embed.num_patches * model.patch_embed.proj.weight.numel()
    forward, backward, first = embedding, embedding * learns, 0 if learns else min(prefixes)
    for index in range(len(model.blocks)):
        read = 1 if index == len(model.blocks) - 1 else tokens  # the last block computes the class token only
        qkv, rest = 2 * width**2 * (read + 2 * tokens), 2 * (width**2 + 2 * width * hidden) * read
        attention = 4 * width * read * (tokens + prefixes.get(index, 0))
        forward += qkv + attention + rest
        if learns:
            backward += 2 * (qkv + rest + attention)
        elif index == first:  # neither queries nor what goes into the block need a gradient
            backward += rest + attention * 3 // 2
        elif index > first:
            backward += qkv + rest + attention * 2
    return forward, backward


@pytest.mark.parametrize(
    ("name", "size", "lengths"),
    [("test_vit", 32, {0: 3, 1: 5}), ("test_vit", 64, {2: 4, 4: 1}), ("vit_tiny_patch16_224", 224, {2: 4, 3: 4, 4: 4})],
)
def test_operations_equal_an_analytic_count(name: str, size: int, lengths: dict[int, int]) -> None:
    backbone = load_backbone(name, "random", size).model
    count = measure.flops(backbone, {index: prefix(length, backbone.width) for index, length in lengths.items()})
    assert (count.prompted, count.backward) == products(backbone.model, lengths)
    if size == 224:
        assert (count.query, count.prompted, count.backward) == (2_332_821_504, 2_334_637_056, 2_080_073_856)
    assert count.training == count.inference + count.backward == count.query + count.prompted + count.backward
    assert measure.flops(backbone) == measure.Count(count.query, count.query, 0)
    backbone.unfreeze()
    learning = measure.flops(backbone)
    assert (learning.prompted, learning.backward) == products(backbone.model, {}, learns=True)


def test_injected_tokens_and_shifts_are_counted() -> None:
    backbone, images = load_backbone("test_vit", "random", 32).model, torch.zeros(1, 3, 32, 32)
    shift, tokens = ClassTokenShift(torch.ones(1, 64), torch.ones(1, 64)), Tokens(torch.ones(1, 7, 64))
    cases: list[tuple[Prompts, Readout]] = [({0: tokens}, "tokens"), ({5: shift}, "class before norm")]
    for prompts, readout in cases:
        with torch.no_grad():
            expected = counted(functools.partial(backbone.features, images, prompts, readout))
        assert measure.flops(backbone, prompts, readout).prompted == expected


def test_a_method_s_own_prompts_are_counted() -> None:
    count = measure.count_flops(build("probprompt", method={"tokens": 6, "blocks": [1, 2]}))
    backbone = load_backbone("test_vit", "random", 32).model
    assert count == measure.flops(backbone, {1: prefix(3), 2: prefix(3)})


@pytest.mark.parametrize(
    "groups",
    (
        {"head": {"kind": "ridge", "projections": 0, "flip_average": True}},
        {"method": {"evaluation_draws": 3, "blocks": [0, 1, 2]}},
    ),
    ids=("mirrored", "drawn"),
)
def test_all_passes_of_a_prediction_are_counted(groups: dict[str, Any]) -> None:
    site = build("probprompt", **groups)
    count = measure.count_flops(site)
    once = count.query + count.prompted
    assert count.inference == (2 * once if "head" in groups else once + 2 * count.prompted)
    done = counted(lambda: site.model.look(torch.zeros(1, 3, 32, 32)))
    assert abs(done / count.inference - 1) < 0.1  # a pass that is missing would be a quarter


# Time -----------------------------------------------------------------------------------------------------------


def test_images_and_steps_are_those_of_the_measurement_without_its_warm_up() -> None:
    calls = []

    def work() -> tuple[int, int]:
        calls.append(time.perf_counter())
        time.sleep(0.004)
        return 7, 2

    begun = time.perf_counter()
    found = timing.rate(work, 0.1, CPU)
    whole = time.perf_counter() - begun
    assert found["images"] == 7 * found["steps"] / 2
    assert len(calls) - 3 <= found["steps"] / 2 <= len(calls) - 2  # two or three calls came before
    assert 0.004 <= found["first_s"] <= found["warm_up_s"] < whole - found["seconds"] + 1e-3
    assert found["seconds"] >= 0.004 * found["steps"] / 2
    assert (
        1 < len(found["rounds"]) <= timing.ROUNDS
        and min(found["rounds"]) <= found["images_per_s"] <= max(found["rounds"]) < 7 / 0.004
    )


def test_a_round_that_something_else_slows_down_does_not_count() -> None:
    pauses = iter([0.01] * 4 + [0.6] + [0.01] * 100)

    def work() -> tuple[int, int]:
        time.sleep(next(pauses))
        return 1, 1

    found = timing.rate(work, 0.1, CPU)
    assert found["images_per_s"] > 1.3 * found["images"] / found["seconds"]


def test_latency_has_a_median_and_a_tail() -> None:
    slow = timing.latency(lambda number: time.sleep(0.05 if number % 5 == 4 else 0.001), 0.3, CPU)
    assert 1 <= slow["median_ms"] < 40 and slow["p99_ms"] > 45 and slow["count"] >= 5


def test_the_peak_is_that_of_products() -> None:
    peak = timing.matrix_peak(CPU, "fp32", 0.01)
    square = torch.ones(256, 256)
    one = min(timing.timed(lambda: square @ square, CPU) for _ in range(5))
    assert peak["size"] in timing.PEAK_SIZES["cpu"] and peak["precision"] == "fp32"
    assert peak["flops"] > 2 * 256**3 / one / 10


def test_an_epoch_trains_the_images_it_says(count_queries: Callable[[Any], list[int]]) -> None:
    place = build()
    seen = count_queries(place)
    before = [parameter.detach().clone() for parameter in place.model.method.parameters()]
    assert measure.Epochs(place)(3) == (12, 3)
    assert seen == [4, 4, 4]
    assert any(not torch.equal(old, new) for old, new in zip(before, place.model.method.parameters(), strict=True))


def test_training_is_counted_in_whole_batches() -> None:
    found = measure.training(build(), 0.02)
    assert found is not None and found.rate["images"] == 4 * found.rate["steps"] > 0


@pytest.mark.parametrize("method", ["nearest-mean", "ranpac"])
def test_what_is_not_trained_has_no_training(method: str) -> None:
    assert measure.training(build(method), 0.02) is None


# Stages ---------------------------------------------------------------------------------------------------------


def test_the_shares_of_the_stages_are_all_of_the_time_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    place = build()
    monkeypatch.setenv(SWITCH, "on")
    backward, own = torch.autograd.backward, [set(vars(part)) for part in (place.learner.viewer, place.model.backbone)]
    shares = timing.shares(place, 2)
    assert tuple(shares) == timing.STAGES and sum(shares.values()) == pytest.approx(1)
    assert all(share > 0 for share in shares.values())
    assert torch.autograd.backward is backward and os.environ[SWITCH] == "on"
    assert [set(vars(part)) for part in (place.learner.viewer, place.model.backbone)] == own


@pytest.mark.parametrize(("stage", "part", "name"), [("prompts", "method", "prompts"), ("query", "backbone", "query")])
def test_a_slow_stage_is_found(stage: str, part: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = build()
    owner = getattr(place.model, part)
    original = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    assert timing.shares(place, 1)[stage] > 0.5


def test_a_call_inside_a_stage_belongs_to_that_stage() -> None:
    watch = timing.Stopwatch(CPU)
    inner = watch.around("prompted forward", lambda: time.sleep(0.01))
    watch.around("query", inner)()
    assert watch.seconds["query"] >= 0.01 and watch.seconds["prompted forward"] == 0


# Memory ---------------------------------------------------------------------------------------------------------


def test_tensors_are_followed_from_birth_to_death() -> None:
    old = torch.ones(500)
    with measure.LiveTensors() as live:
        first = old + 1  # 2000 bytes
        first.add_(1)
        first[10:].view(49, 10)
        old.mul_(2)
        second = first * first  # 2000 more
        del first
        third = torch.zeros(250)  # 1000, in the place of the first
    assert (live.peak, live.now) == (4000, 3000)
    del second, third
    assert live.now == 0


def test_the_way_back_is_followed_too() -> None:
    weight = nn.Parameter(torch.ones(100, 100))
    with measure.LiveTensors() as live:
        (weight * weight).sum().backward()
    assert live.now == 40_000  # the gradient
    assert live.peak >= 80_000


def test_memory_grows_with_the_batch_from_what_is_always_held() -> None:
    peaks = []
    for batch in (4, 8, 12):
        place = build(training={"batch_size": batch})
        found = measure.training(place, 0.01)
        assert found is not None and found.reserved is None
        peaks.append(found.peak)
    weights = measure.size_of(place.model.parameters())
    assert peaks[0] < peaks[1] < peaks[2]
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.1)
    assert 2 * peaks[0] - peaks[1] > weights


def test_shared_memory_is_counted_once() -> None:
    whole = torch.ones(10)
    assert measure.size_of([whole, whole[:5], torch.ones(3)]) == 52


# What is measured -----------------------------------------------------------------------------------------------


def test_images_have_the_shapes_of_photographs_and_are_noise() -> None:
    images = synthetic.random_images(10, 20)
    assert {min(image.shape[:2]) for image in images} == {20}
    assert {image.shape[:2] for image in images} == {(20, 20), (20, 25), (20, 30), (25, 20), (30, 20)}
    assert len({image.tobytes() for image in images}) == 10 and images[0].std() > 60


def test_tasks_before_the_measured_one_have_been() -> None:
    place = build("coda-prompt")
    assert (place.task.index, place.task.first, place.task.classes, place.later) == (2, 5, 3, 0)
    assert len(place.model.method.get_parameter("keys.2")) == 5  # blocks; a slice for every task
    assert len(place.model.head) == 8 and len(place.learner.statistics) == 5
    place.close()
    assert len(place.learner.statistics) == 8


def test_a_task_has_as_many_images_as_are_asked_for_of_its_own_classes() -> None:
    place = build()
    task = place.steps_of(20)
    assert len(task) == 80 and place.learner.steps(task) == 20
    assert set(task.labels.tolist()) == {5, 6, 7} and int(task.rows.max()) < synthetic.STORED["cpu"]


def test_where_prompts_learn_in_the_first_task_that_one_is_measured() -> None:
    place = build("probprompt", head={"kind": "ridge", "projections": 32})
    assert (place.task.index, place.task.classes, place.later) == (0, 3, 5)
    place.close()
    assert measure.inference(place, 0.01)["images_per_s"] > 0 and len(place.model.head) == 8


def test_all_at_once_is_one_task() -> None:
    assert build("joint").task.classes == 8


@pytest.mark.parametrize(
    ("tasks", "sizes"), [(None, (20,) * 10), (3, (67, 67, 66)), ([4, 2], (4, 2)), ([["a", "b"], ["c", "d"]], (2, 2))]
)
def test_the_scale_is_what_is_set(tasks: Any, sizes: tuple[int, ...]) -> None:
    assert Scale.of(config(data={"tasks": tasks})).sizes == sizes


def test_more_tasks_than_classes_are_refused() -> None:
    with pytest.raises(UserError, match="2 classes into 3 tasks"):
        Scale.even(3, 2)


@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [
        ("sup1k", None, ("vit_base_patch16_224", "random")),
        ("vit_tiny_patch16_224.augreg_in21k", None, ("vit_tiny_patch16_224", "random")),
        ("test_vit", None, ("test_vit", "random")),
        ("demo", None, ("demo", None)),
        ("vit_tiny_patch16_224", "mine.safetensors", ("vit_tiny_patch16_224", "mine.safetensors")),
    ],
)
def test_nothing_is_downloaded(name: str, weights: str | None, expected: tuple[str, str | None]) -> None:
    chosen = synthetic.without_download(BackboneConfig(name=name, weights=weights))
    assert (chosen.name, chosen.weights) == expected


@pytest.mark.parametrize("method", methods.registered())
def test_every_method_is_measured(method: str) -> None:
    peaks = measure.Peaks(CPU)
    peaks.measured["fp32"] = PEAK
    entry = measure.measure(config(method, data={"tasks": [2, 2]}), 0.002, peaks)
    made = methods.find(method)
    assert (entry["training"] is None) == (made.preferred_head not in ("linear", "normalized"))
    assert (entry["stages"] is None) == (not made.learns)
    assert entry["inference"]["images"] == 4 * entry["inference"]["steps"] > 0
    assert entry["latency"]["p99_ms"] >= entry["latency"]["median_ms"] > 0
    needed, speed = entry["flops_per_image"]["inference"], entry["inference"]["images_per_s"]
    assert entry["share_of_peak"]["inference"] == pytest.approx(needed * speed / 1e9)
    assert ("training" in entry["share_of_peak"]) == made.learns
    if entry["training"]:
        assert entry["cost"]["epoch_s"] == pytest.approx(24_000 / entry["training"]["images_per_s"])
    assert entry["cost"]["fps"] == pytest.approx(1000 / entry["latency"]["median_ms"])
    json.dumps(entry, allow_nan=False)


def test_the_memory_of_prompts_is_that_of_the_method() -> None:
    place = build("probprompt", method={"tokens": 4, "components": 3, "blocks": [0, 1]})
    memory = measure._memory(place, None)
    assert memory["prompts"] == 2 * 2 * 4 * 3 * 64 * 4  # means and deviations, blocks, tokens, components, width, bytes
    assert memory["images"] == sum(array.nbytes for array in synthetic.random_images(64, 37))


# Records --------------------------------------------------------------------------------------------------------


def entry(method: str, speed: float, **more: Any) -> Any:
    return {
        "method": method,
        "backbone": "demo",
        "image_size": 64,
        "batch": 16,
        "precision": "fp32",
        "classes": 200,
        "task": 10,
        "config": {"head": {}, "method": {}},
        "training": {"images_per_s": speed},
        "inference": {"images_per_s": 2 * speed},
        "frozen_pass": {"images_per_s": 4 * speed},
        "latency": {"median_ms": 100 / speed, "p99_ms": 200 / speed},
        "memory": {"training_peak": 1000},
        **more,
    }


@functools.cache
def empty_record() -> results.BenchRecord:
    return results.make_record([], [], {"fp32": PEAK}, CPU, 1.0)


def made(*results: Any) -> results.BenchRecord:
    return {**empty_record(), "results": list(results)}


def test_a_record_says_all_and_is_read_again(tmp_path: Path) -> None:
    written = made(entry("apt", 10.0))
    results.write_record(tmp_path / "bench.json", written)
    found = results.read_record(tmp_path / "bench.json")
    assert found == with_hash(written) and found["hardware"]["device"] == "cpu" and found["versions"]["torch"]
    assert found["matrix_peak"] == {"fp32": {"flops": 1e9, "size": 512, "precision": "fp32"}}


def test_ratios_are_now_over_before() -> None:
    before = made(entry("apt", 10.0), entry("l2p", 10.0, training=None))
    found = results.ratios(before, made(entry("apt", 15.0), entry("l2p", 5.0), entry("vq-prompt", 1.0)))
    of = {(ratio.subject, ratio.words): ratio for ratio in found}
    assert len(found) == 6 + 5  # nothing was trained before, and one method was not there
    assert of["apt", "training, images/s"].ratio == pytest.approx(1.5) and of["apt", "training, images/s"].better
    shorter = of["apt", "latency of one image, median, ms"]
    assert shorter.ratio == pytest.approx(2 / 3) and shorter.better
    assert not of["l2p", "inference, images/s"].better and not of["l2p", "latency of one image, 99%, ms"].better
    assert of["l2p", "peak memory in training, bytes"].better


def test_the_most_similar_entry_is_compared_with_and_what_differs_is_said() -> None:
    before = made(entry("apt", 1.0, batch=64, precision="bf16"), entry("apt", 10.0, batch=64))
    now = made(entry("apt", 10.0))
    ((old, new),) = results.matched(before, now)
    assert results.differences(old, new) == ["batch 64 before, 16 now"]
    mirrored = entry("apt", 5.0, config={"head": {"mirrored": True}, "method": {"evaluation_draws": 3}})
    assert results.differences(new, mirrored) == [
        "flip_average False before, True now",
        "evaluation_draws 1 before, 3 now",
    ]
    assert results.ratios(before, now)[0].ratio == pytest.approx(1)


# The command ----------------------------------------------------------------------------------------------------

QUICK = ("--backbone=test_vit", "--image-size=32", "--batch-size=4", "--seconds=0.01", "--set", "tasks=[3, 2]")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_a_method_is_measured_recorded_and_compared(probprompt: Command, here: Path) -> None:
    answer = probprompt("bench", *QUICK, "--out", "first.json")
    assert answer.code == 0, answer.err
    assert "probprompt on test_vit, fp32" in answer.out and "Batches of 4 images of 32 px" in answer.out
    for words in ("training", "inference, two passes", "one image", "of the peak", "Warm-up", "backward"):
        assert words in answer.out
    (found,) = results.read_record(here / "first.json")["results"]
    assert found["config"]["data"]["tasks"] == [3, 2] and found["classes"] == 5
    again = probprompt("bench", *QUICK, "--batch-size", "6", "--compare-to", "first.json")
    assert again.code == 0, again.err
    assert "ratio" in again.out and "Different settings, probprompt: batch 4 before, 6 now" in again.out


@pytest.mark.parametrize(
    ("options", "told"),
    (
        (("--methods", "ranpac"), "inference  "),
        (("--methods", "ranpac", "--set", "head.flip_average=true"), "inference, two passes"),
        (("--set", "evaluation_draws=5"), "inference, 6 passes"),
        (("--methods", "l2p", "--set", "head.kind=ridge", "--set", "head.flip_average=true"), "inference, four passes"),
    ),
)
def test_it_is_told_how_many_passes_a_prediction_takes(
    probprompt: Command, here: Path, options: tuple[str, ...], told: str
) -> None:
    answer = probprompt("bench", *QUICK, *options)
    assert answer.code == 0 and told in answer.out, answer


def test_a_cost_table_of_several_methods(probprompt: Command, here: Path) -> None:
    answer = probprompt("bench", *QUICK, "--methods", "apt,linear-probe", "--methods", "lda")
    assert answer.code == 0, answer.err
    lines = {line.split()[0]: line.split() for line in answer.out.splitlines() if line.strip()}
    assert lines["apt"][1] == "0.00" and lines["lda"].count("-") == 3
    assert "24,000 images" in answer.out and "only the head" in answer.out


def test_what_was_measured_stays_where_the_rest_is_cut_off(
    probprompt: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure.measure

    def cut(config: RunConfig, *given: Any) -> results.Entry:
        if config.method.name == "lda":
            raise KeyboardInterrupt
        return whole(config, *given)

    monkeypatch.setattr(measure, "measure", cut)
    answer = probprompt("bench", *QUICK, "--methods", "apt,linear-probe,lda", "--out", "costs.json")
    assert answer.code == 130
    found = results.read_record(here / "costs.json")
    assert [entry["method"] for entry in found["results"]] == ["apt", "linear-probe"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--methods", "prob-prompt"), "Did you mean 'probprompt'"),
        (("--methods", "apt,vqprompt"), "Did you mean 'vq-prompt'"),
        (("--backbone", "vit_bse_patch16_224"), "vit_base_patch16_224"),
        (("--out", "nowhere/bench.json"), "does not exist"),
        (("--compare-to", "absent.json"), "absent.json"),
        (("--compare-to", "other.json"), "is not a benchmark record"),
        (("--compare-to", "later.json"), "has format 99"),
        (("--compare-to", "changed.json"), "does not match its recorded hash"),
        (("--set", "sample=3"), "Did you mean"),
        (("--preset", "flagship", "--methods", "apt"), "flagship"),
    ],
)
def test_mistakes_are_answered_in_words(
    probprompt: Command, here: Path, arguments: tuple[str, ...], words: str
) -> None:
    (here / "other.json").write_text("[1]")
    (here / "later.json").write_text(json.dumps({"kind": results.KIND, "format": 99}))
    changed = {**with_hash({"kind": results.KIND, "format": results.FORMAT, "seconds": 2.0}), "seconds": 1.0}
    (here / "changed.json").write_text(json.dumps(changed))
    answer = probprompt("bench", *arguments)
    assert answer.code == 2 and words in answer.err and "Traceback" not in answer.err


def test_a_preset_gives_its_settings_and_options_go_over_it() -> None:
    given: dict[str, dict[str, Any]] = {"backbone": {"name": None, "precision": "fp32"}, "training": {"batch_size": 6}}
    found = bench_config("vq-prompt", given, "published", ["data.benchmark=cub200"], CPU)
    assert found.method.model_dump()["temperature"] == 5.0 and found.training.batch_size == 6
    assert found.backbone.name == "sup21k" and found.backbone.precision == "fp32"
    usual = bench_config("vq-prompt", {"backbone": {"name": None}, "training": {"batch_size": None}}, None, [], CPU)
    assert (usual.backbone.name, usual.training.batch_size) == ("demo", 16)


def test_predictions_are_the_engine_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    place, seen = build(), list[int]()
    original = place.model.predict

    def watched(images: Tensor, keys: Tensor | None) -> Tensor:
        seen.append(len(images))
        return original(images, keys=keys)

    monkeypatch.setattr(place.model, "predict", watched)
    found = measure.inference(place, 0.01)
    assert sum(seen) >= found["images"] + 8 and set(seen) == {4}
    seen.clear()
    assert measure.latency(place, 0.01)["count"] == len(seen) - 3 and set(seen) == {1}


def test_a_backbone_is_made_once_and_each_measurement_has_its_own() -> None:
    first, second = (synthetic.fresh_backbone("test_vit", "random", 32) for _ in range(2))
    assert first.sha256 == second.sha256 and first.model is not second.model
    with torch.no_grad():
        next(first.model.parameters()).add_(1)
    assert synthetic.fresh_backbone("test_vit", "random", 32).model.fingerprint() == second.model.fingerprint()
    assert synthetic.cached_backbone.cache_info().hits >= 2
