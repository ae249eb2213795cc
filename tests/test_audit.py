"""The audit: what is independent passes, published mistakes and every kind of leak fail, and the proof is written."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from probprompt import methods
from probprompt.backbones.vit import FrozenViT
from probprompt.cli import cmd_audit
from probprompt.config import parse_config
from probprompt.data.image_store import ImageStore, Loaded
from probprompt.engine.learner import Learner
from probprompt.engine.loader import TaskImages
from probprompt.engine.model import PromptedModel
from probprompt.engine.saved_model import load_model
from probprompt.errors import UserError
from probprompt.evaluation.audit import TOLERANCES, Audit, Check, Tolerance, audit, compare, spread_of
from probprompt.heads.linear import LinearHead
from probprompt.methods import EVALUATION, Context, Method, Prompted, Shape
from probprompt.progress import SILENT
from probprompt.prompts import Prefix
from probprompt.randomness import Noise
from probprompt.runs import leak_audit, train
from probprompt.runs.leak_audit import AuditReport, audit_method, audit_saved
from probprompt.runs.run import Run

CPU = torch.device("cpu")
TINY = {"name": "test_vit", "weights": "random", "image_size": 32}
CHECKS = ["outputs", "batch size", "batch mates", "order", "task-pure batches", "unseen classes", "prompts"]
CHECKS += ["repeated", "nothing told", "future classes"]
SMALL: dict[str, dict[str, Any]] = {
    "probprompt": {"samples": 2, "components": 3, "tokens": 4, "blocks": (0, 2)},
    "evo-prompt": {"hidden": 4, "blocks": (0, 2)},
}
ALONE = ("task-pure batches", "future classes")  # do not apply where there is one task
PASSES = {"outputs", "repeated", "nothing told", "future classes"}
"""What the published mistakes do not touch."""


def options(name: str) -> list[dict[str, Any]]:
    """A method's published mistakes that show at evaluation."""
    fields = methods.registered()[name].Config.model_fields
    return [{"name": name, option: True} for option in ("batchwise", "legacy_reshape") if option in fields]


LEGACY = [option for name in methods.registered() for option in options(name)]


def config_for(pictures: Path, method: dict[str, Any], **groups: Any) -> Any:
    return parse_config(
        {
            "data": {"benchmark": str(pictures), "tasks": 3},
            "backbone": TINY,
            "method": method,
            "training": {"epochs": 1, "batch": 8},
            "alignment": {"epochs": 1},
            "head": {"projections": 40},
            **groups,
        }
    )


@pytest.fixture(scope="module")
def proved(pictures: Path) -> Callable[..., AuditReport]:
    """The proof on a method, made once; of its published mistakes under one future only."""

    @cache
    def made(precision: Any, *settings: tuple[str, Any]) -> AuditReport:
        given = dict(settings)
        config = config_for(pictures, {**SMALL.get(given["name"], {}), **given})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leak_audit, "CLASS_IMAGES", 4)
            if config.method.marks():
                patch.setattr(leak_audit, "_FUTURES", leak_audit._FUTURES[:1])
            return audit_method(config, CPU, precision, count=6 if config.method.marks() else 4)

    return lambda method, precision="fp32": made(precision, *method.items())


def by_name(outcome: Audit) -> dict[str, Check]:
    return {check.name: check for check in outcome.checks}


# Every method


@pytest.mark.parametrize("name", methods.registered())
def test_every_method_is_independent(proved: Callable[..., AuditReport], name: str) -> None:
    outcome = proved({"name": name}).audit
    checks, kind = by_name(outcome), methods.registered()[name]
    assert list(checks) == CHECKS and outcome.leaks == () and outcome.passed
    idle = {check.name for check in outcome.checks if check.passed is None}
    assert idle == set(ALONE if kind.joint else ()) | set(() if kind.needs_query else ("prompts",))
    for check in outcome.checks:
        if check.worst is not None:  # rounding stays far within what is allowed
            assert check.images == outcome.images and check.worst < TOLERANCES["fp32"].difference / 50
    if not kind.joint:
        assert checks["future classes"].worst == 0 and checks["future classes"].tolerance == 0
        assert checks["unseen classes"].note == "" and outcome.tasks == 2 and outcome.classes == 4


@pytest.mark.parametrize("method", LEGACY, ids=str)
def test_published_mistakes_fail_by_far(proved: Callable[..., AuditReport], method: dict[str, Any]) -> None:
    found = proved(method)
    checks, leaks = by_name(found.audit), set(found.audit.leaks)
    assert {"batch size", "batch mates", "unseen classes", "prompts"} <= leaks and not leaks & PASSES
    assert ("order" in leaks) == ("legacy_reshape" in method)  # votes have no order
    for name in leaks - {"prompts"}:
        assert (checks[name].worst or 0) > 20 * TOLERANCES["fp32"].difference
    assert (checks["prompts"].worst or 0) > 500 * TOLERANCES["fp32"].difference
    assert found.about["marks"] == list(methods.parse_config(method).marks()) != []


def test_there_are_published_mistakes_to_find() -> None:
    assert {"l2p", "l2p++", "deep-l2p++", "dual-prompt"} <= {method["name"] for method in LEGACY}
    assert len([method for method in LEGACY if method["name"] == "dual-prompt"]) == 2


@pytest.mark.parametrize("name", ["probprompt", "ft"])
def test_methods_are_independent_in_bf16(proved: Callable[..., AuditReport], name: str) -> None:
    outcome = proved({"name": name}, "bf16").audit
    assert outcome.passed and outcome.precision == "bf16" and outcome.tolerance == TOLERANCES["bf16"]
    checks, exact = by_name(outcome), by_name(proved({"name": name}).audit)
    assert checks["batch size"].tolerance == TOLERANCES["bf16"].difference
    assert checks["prompts"].tolerance in (None, TOLERANCES["fp32"].difference)
    assert outcome.spread != proved({"name": name}).audit.spread  # it did compute in another precision
    assert checks["future classes"] == exact["future classes"]


def test_published_mistakes_fail_in_bf16(proved: Callable[..., AuditReport]) -> None:
    """However little a prompt does to the logits, it is compared by itself."""
    outcome = proved({"name": "deep-l2p++", "batchwise": True}, "bf16").audit
    assert "prompts" in outcome.leaks and not set(outcome.leaks) & PASSES


# Every kind of leak

Rule = Callable[["Toy", Tensor], Tensor]


class Toy(Method):
    """Prefixes that are a rule of the queries."""

    Config = methods.MethodConfig
    summary = "a toy"

    def __init__(self, rule: Rule, shape: Shape) -> None:
        super().__init__(shape, 0)
        self.rule, self.asked = rule, 0

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        assert query is not None
        self.asked += 1
        return Prompted({0: Prefix.split(self.rule(self, query)[:, None].expand(-1, 4, -1))})


def noise(toy: Toy, query: Tensor) -> Tensor:
    return query + torch.randn_like(query)


COMPANY = {"batch size", "batch mates", "unseen classes", "prompts"}
RULES: dict[str, tuple[Rule, set[str], set[str]]] = {
    "own query": (lambda toy, query: query, set(), set(CHECKS)),
    "batch mean": (lambda toy, query: query.mean(0) + query, COMPANY | {"task-pure batches"}, {"order", "repeated"}),
    "largest of the batch": (lambda toy, query: query - query.amax(0), COMPANY, {"order", "repeated"}),
    "batch size": (lambda toy, query: query * len(query), COMPANY, {"order", "repeated"}),
    "place": (lambda toy, query: query + torch.arange(len(query))[:, None], COMPANY | {"order"}, {"repeated"}),
    "neighbour": (lambda toy, query: query + query.roll(1, 0), COMPANY | {"order"}, {"repeated"}),
    "memory": (lambda toy, query: query + toy.asked / 10, {"repeated"}, set()),
    "noise": (noise, {"repeated", "batch size", "prompts"}, set()),
}


def tiny() -> FrozenViT:
    """Two blocks."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return FrozenViT(
            VisionTransformer(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=0)
        )


@pytest.fixture(scope="module")
def backbone() -> FrozenViT:
    return tiny()


def model_of(backbone: FrozenViT, rule: Rule, classes: int = 5) -> PromptedModel:
    head = LinearHead(backbone.width, 3).grow(classes)
    return PromptedModel(backbone, Toy(rule, Shape(backbone.width, backbone.depth)), head)


def pictures_of(count: int, seed: int) -> Tensor:
    """Images of one colour and some noise: they differ as classes do."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 1, 1, generator=source) + 0.3 * torch.randn(count, 3, 16, 16, generator=source)


def audit_toy(backbone: FrozenViT, rule: Rule, **settings: Any) -> Audit:
    images, tasks = pictures_of(10, 1), torch.arange(10) % 2
    return audit(model_of(backbone, rule), images, tasks, **{"classes": 5, "strangers": pictures_of(3, 2), **settings})


@pytest.mark.parametrize("name", RULES)
def test_each_kind_of_leak_is_found_and_named(backbone: FrozenViT, name: str) -> None:
    rule, fails, passes = RULES[name]
    outcome = audit_toy(backbone, rule)
    assert fails <= set(outcome.leaks) and not passes & set(outcome.leaks)
    assert {"outputs", "nothing told"}.isdisjoint(outcome.leaks)
    for check in outcome.checks:
        if check.name in fails:
            assert (check.worst or 0) > 10 * TOLERANCES["fp32"].difference and (check.share or 0) > 0.2


def test_a_leak_from_unseen_classes_alone_is_found(backbone: FrozenViT) -> None:
    """Something that only happens beside an image far from all others."""
    far = 9 * pictures_of(1, 4)
    odd = backbone.query(far)

    def rule(toy: Toy, query: Tensor) -> Tensor:
        return query * (2 if bool(((query - odd).norm(dim=1) < 1e-2).any()) else 1)

    assert audit_toy(backbone, rule, strangers=far).leaks == ("unseen classes",)


def test_tasks_that_help_each_other_are_found(backbone: FrozenViT) -> None:
    """What all images of a batch agree on tells the task of a task-pure batch."""
    images, tasks = pictures_of(8, 1), torch.arange(8) % 2
    queries = backbone.query(images)

    def rule(toy: Toy, query: Tensor) -> Tensor:
        known = torch.cdist(query, queries).argmin(dim=1) % 2  # the task of each
        pure = len(query) == 4 and bool((known == known[0]).all())
        return query * (2 if pure else 1)

    outcome = audit(model_of(backbone, rule), images, tasks, 5)
    assert "task-pure batches" in outcome.leaks and not {"batch size", "order"} & set(outcome.leaks)


def test_what_the_method_is_told_is_seen(backbone: FrozenViT) -> None:
    class Telling(PromptedModel):
        told: Context = EVALUATION

        def features(self, images: Any, context: Context = EVALUATION, query: Any = None, layers: int = 0) -> Any:
            return super().features(images, self.told, query, layers)

    clean = model_of(backbone, RULES["own query"][0])
    model = Telling(clean.backbone, clean.method, clean.head)
    for told, said in (
        (Context(), ""),
        (Context(task=0), "the method was told: task"),
        (Context(labels=torch.zeros(1)), "the method was told: labels"),
        (Context(noise=Noise(torch.tensor([1])), first=2), "the method was told: first, noise"),
        (Context(training=True), "the method was told: training"),
    ):
        model.told = told
        outcome = audit(model, pictures_of(4, 1), torch.zeros(4), 5)
        assert outcome.leaks == (("nothing told",) if said else ())
        assert by_name(outcome)["nothing told"].note == said
    assert "prompts" not in vars(model.method)  # left as it was


def test_logits_of_classes_that_were_never_learned_are_seen(backbone: FrozenViT) -> None:
    outcome = audit_toy(backbone, RULES["own query"][0], classes=4)
    assert outcome.leaks == ("outputs",) and by_name(outcome)["outputs"].note == "5 logits for 4 classes"


def test_what_does_not_apply_neither_passes_nor_fails(backbone: FrozenViT) -> None:
    images = pictures_of(5, 1)
    outcome = audit(model_of(backbone, RULES["own query"][0]), images, torch.zeros(5), 5)
    check = by_name(outcome)["task-pure batches"]
    assert check.passed is None and check.worst is None and check.note.startswith("not applicable")
    assert outcome.passed and "noise stands for it" in by_name(outcome)["unseen classes"].note


def test_what_cannot_be_audited_is_said(backbone: FrozenViT) -> None:
    model = model_of(backbone, RULES["own query"][0])
    with pytest.raises(UserError, match="at least 2 images, got 1"):
        audit(model, pictures_of(1, 1), torch.zeros(1), 5)
    with pytest.raises(UserError, match="not finite"):
        audit(model, pictures_of(3, 1) * torch.nan, torch.zeros(3), 5)
    wide = tiny()
    wide.model.double()
    with pytest.raises(UserError, match=r"torch\.float64.*float32 and bfloat16 only"):
        audit(model_of(wide, RULES["own query"][0]), pictures_of(3, 1), torch.zeros(3), 5)


def test_precision_is_the_backbones_alone(backbone: FrozenViT) -> None:
    model = model_of(tiny(), RULES["own query"][0])
    model.set_precision("bf16")
    assert model.precision == model.backbone.precision == "bf16" and model.head.weight.dtype == torch.float32
    assert model.predict(pictures_of(2, 1)).dtype == torch.float32


# What is measured


def test_a_difference_is_part_of_the_spread_of_the_logits() -> None:
    expected = torch.tensor([[0.0, 4.0, 1.0], [3.0, 1.0, 2.0], [0.0, -3.0, -1.0]])
    assert spread_of(expected) == 3.0
    found = expected + torch.tensor([[0.0, 0.3, 0.0], [-1.5, 0.0, 0.0], [0.0, 0.0, 0.003]])
    check = compare("a", "b", [expected, found], expected, 3.0, Tolerance(0.15))
    assert check.worst == pytest.approx(0.5) and check.share == pytest.approx(1 / 3) and check.images == 3
    assert check.changed == 1 and check.passed is False
    assert compare("a", "b", [found, expected], expected, 3.0, Tolerance(0.15)) == check
    assert compare("a", "b", [found], expected, 3.0, Tolerance(0.5001)).passed is True
    assert spread_of(torch.tensor([[2.0], [-4.0]])) == 3.0  # of one class, its size


def test_a_share_of_images_may_be_beyond_where_it_is_allowed() -> None:
    expected = torch.zeros(40, 2)

    def passed(beyond: int, share: float, count: int = 40) -> bool | None:
        found = expected[:count].clone()
        found[:beyond] += 1
        return compare("a", "b", [found], expected[:count], 1.0, Tolerance(0.5, share)).passed

    assert passed(0, 0.0) and not passed(1, 0.0)
    assert passed(4, 0.1) and not passed(5, 0.1)
    assert passed(1, 0.1, count=4) and not passed(2, 0.1, count=4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_a_leak_and_can_be_written(value: float) -> None:
    expected = torch.zeros(2, 3)
    found = expected.clone()
    found[1, 2] = value
    check = compare("a", "b", [found], expected, 1.0, Tolerance(0.1))
    assert check.passed is False and check.share == 0.5
    json.dumps(vars(check), allow_nan=False)


def test_another_number_of_logits_is_a_leak() -> None:
    check = compare("a", "b", [torch.zeros(2, 4)], torch.zeros(2, 3), 1.0, Tolerance(0.1))
    assert check.passed is False and check.note == "4 logits instead of 3"


# The future

Begin = Callable[[Learner, TaskImages], None]
begin_as_it_is = Learner.begin


def room_for_all(learner: Learner, task: TaskImages) -> None:
    """As published: a head for all classes that will ever come."""
    if task.index == 0:
        learner.trained.grow(int(learner.images.labels.max()) + 1 - task.classes)
    begin_as_it_is(learner, task)


def knows_how_many(learner: Learner, task: TaskImages) -> None:
    begin_as_it_is(learner, task)
    with torch.no_grad():
        learner.trained.weight[task.first :] *= 1 + len(learner.images.labels) / 1000


def knows_the_tasks(learner: Learner, task: TaskImages) -> None:
    begin_as_it_is(learner, task)
    tasks = learner.config.data.tasks
    with torch.no_grad():
        learner.trained.bias[0] += 0.1 * (len(tasks) if isinstance(tasks, tuple) else 3)


def looks_ahead(learner: Learner, task: TaskImages) -> None:
    begin_as_it_is(learner, task)
    with torch.no_grad():
        learner.trained.bias[0] += learner.images.store.pixels.float().mean() / 1000


@pytest.mark.parametrize(
    ("begin", "future"),
    [(room_for_all, "none"), (knows_how_many, "none"), (knows_the_tasks, "none"), (looks_ahead, "another")],
)
def test_an_engine_that_knows_the_future_is_found(
    pictures: Path, begin: Begin, future: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leak_audit, "_FUTURES", ("as it is", future))
    config = config_for(pictures, {"name": "linear-probe"})
    monkeypatch.setattr(Learner, "begin", begin)
    outcome = audit_method(config, CPU, count=2).audit
    assert set(outcome.leaks) == {"future classes"} | ({"outputs"} if begin is room_for_all else set())


def test_futures_agree_in_what_is_learned_and_in_nothing_else(pictures: Path) -> None:
    tasks = ("class3", "class1"), ("class5",), ("class0", "class2"), ("class4",)
    names = *tasks[:2], ("class4", "class2", "class0")
    config = config_for(pictures, {"name": "linear-probe"}, data={"benchmark": str(pictures), "tasks": tasks})
    first = train.prepare(config, CPU, SILENT)
    other = leak_audit._with_another_future(first, 2)
    assert other.data.tasks == names
    seen: list[list[Tensor]] = []
    for future, images, told in (("as it is", 48, tasks), ("another", 48, names), ("none", 24, names[:2])):
        workshop = first if future == "as it is" else train.prepare(other, CPU, SILENT)
        learner, learned = leak_audit._world(workshop, future, 2)
        assert len(learner.images.labels) == len(learner.images.store) == len(learner.images.names) == images
        assert learner.config.data.tasks == told
        assert [task.labels.tolist() for task in learned] == [[0] * 8 + [1] * 8, [2] * 8]
        ids = [learner.images.labels[task.rows].tolist() for task in learned]
        assert ids == [[3] * 8 + [1] * 8, [5] * 8]
        seen.append([learner.viewer.evaluation(learner.images.store, task.rows) for task in learned])
    for others in seen[1:]:
        assert all(torch.equal(one, two) for one, two in zip(seen[0], others, strict=True))


def test_images_to_come_become_their_negatives(pictures: Path) -> None:
    images = train.prepare(config_for(pictures, {"name": "linear-probe"}), CPU, SILENT).learner.images
    every = torch.arange(len(images.store))
    before, after = images.store.canvas(every), leak_audit._negatives(images, torch.tensor([3])).store.canvas(every)
    assert (before != after).flatten(1).any(dim=1).nonzero().flatten().tolist() == [3]
    assert torch.equal(before[3], 255 - after[3])


def test_images_of_several_sizes_have_futures_too() -> None:
    store = ImageStore.of([np.full((4, side, 3), side, np.uint8) for side in (5, 6, 7)], CPU)
    images = Loaded(store, torch.tensor([0, 1, 2]), ("a", "b", "c"))
    kept, inverted = leak_audit._only(images, torch.tensor([2, 0])), leak_audit._negatives(images, torch.tensor([1]))
    assert [int(image[0, 0, 0]) for image in kept.store.canvas(torch.arange(2))] == [7, 5] and kept.names == ("c", "a")
    assert [int(image[0, 0, 0]) for image in inverted.store.canvas(torch.arange(3))] == [5, 249, 7]


def test_determinism_is_asked_for_and_given_back() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with leak_audit._deterministic(CPU):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


# Runs and models


@pytest.fixture(scope="module")
def run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run."""
    method = {"name": "probprompt", **SMALL["probprompt"]}
    return train.train(config_for(pictures, method), tmp_path_factory.mktemp("runs") / "run", "cpu")


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    """A copy of the run, to be written to."""
    return Path(shutil.copytree(run.folder, tmp_path / "run"))


def test_the_proof_is_written_into_the_runs_record(run: Run, folder: Path) -> None:
    found = audit_saved(folder, CPU, count=6)
    record = Run.open(folder).record
    written = record.pop("audit")
    assert record == run.record and found.written == folder / "run.json"
    assert written == json.loads(json.dumps(found.to_json())) and written["passed"] is True
    assert written["images"] == 6 and written["tasks"] == 3 and written["classes"] == 6
    assert written["images_of"] == f"{run.config.data.benchmark} (test)"
    assert written["model"] == json.loads((folder / "model" / "model.json").read_text())["tensors"]
    assert written["versions"] == record["versions"] and written["hardware"]["device"] == "cpu"
    assert written["tolerance"] == TOLERANCES["fp32"].difference and written["precision"] == "fp32"
    assert [check["name"] for check in written["checks"]] == CHECKS[:-1]
    assert audit_saved(folder, CPU, count=6).audit == found.audit  # and again


def test_the_images_are_those_the_run_was_evaluated_on(
    pictures: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []

    def watched(*given: Any) -> Audit:
        taken.extend(given)
        return audit(*given)

    monkeypatch.setattr(leak_audit, "audit", watched)
    audit_saved(folder, CPU)
    scorer = train.prepare(Run.open(folder).config, CPU, SILENT).scorer
    expected = scorer.viewer.evaluation(scorer.images.store, torch.arange(12))
    assert torch.equal(taken[1], expected) and taken[2].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert taken[3] == 6 and taken[4] is None
    model = load_model(folder).model
    assert torch.equal(model.predict(expected), taken[0].predict(expected))


def test_a_run_on_held_out_images_is_audited_with_those(pictures: Path, tmp_path: Path) -> None:
    data = {"benchmark": str(pictures), "tasks": 2, "validation": 0.3, "stored_side": "full"}
    run = train.train(config_for(pictures, {"name": "nearest-mean"}, data=data), tmp_path / "run", "cpu")
    found = audit_saved(run.folder, CPU, count=4)
    assert found.audit.passed and found.about["images_of"] == f"{pictures} (validation)"


def test_a_run_that_is_not_finished_meets_its_own_future(pictures: Path, tmp_path: Path) -> None:
    workshop = train.prepare(config_for(pictures, {"name": "nearest-mean"}), CPU, SILENT)
    run = Run.create(tmp_path / "run", train.describe(workshop, "run"))
    under_way = train.RunLoop(run, workshop, None, SILENT, None)
    for task in workshop.tasks[:2]:
        under_way.learn(task)
    outcome = audit_saved(run.folder, CPU).audit
    assert outcome.passed and outcome.classes == 4 and outcome.tasks == 2
    assert by_name(outcome)["unseen classes"].question == "alone, and beside images of classes not learned yet"


def test_a_run_in_the_hands_of_another_is_left_alone(folder: Path) -> None:
    with Run.open(folder).locked(), pytest.raises(UserError, match="another process is working on"):
        audit_saved(folder, CPU)


def test_images_that_changed_are_refused(pictures: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    run = train.train(config_for(moved, {"name": "nearest-mean"}), tmp_path / "run", "cpu")
    (moved / "class0" / "0.png").rename(moved / "class0" / "x.png")
    with pytest.raises(UserError, match=r"are not those of the run.*--data FOLDER"):
        audit_saved(run.folder, CPU)
    assert audit_saved(run.folder, CPU, count=3, data=str(moved)).audit.passed


def test_a_joint_model_has_no_tasks_to_tell_apart(pictures: Path, tmp_path: Path) -> None:
    run = train.train(config_for(pictures, {"name": "joint"}), tmp_path / "run", "cpu")
    outcome = audit_saved(run.folder, CPU, count=4).audit
    assert outcome.passed and outcome.tasks == 1 and by_name(outcome)["task-pure batches"].passed is None


def test_prompts_under_a_head_in_closed_form_are_audited(pictures: Path, tmp_path: Path) -> None:
    config = config_for(pictures, {"name": "vq-prompt"}, head={"kind": "ridge", "projections": 30})
    run = train.train(config, tmp_path / "run", "cpu")
    outcome = audit_saved(run.folder, CPU, count=3).audit
    assert outcome.passed and by_name(outcome)["prompts"].passed


def test_a_bare_model_is_audited_with_noise_or_a_folder(pictures: Path, folder: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(folder / "model", tmp_path / "bare"))
    found = audit_saved(bare, CPU, count=3)
    assert found.audit.passed and found.about["images_of"] == "noise" and found.audit.images == 3
    assert found.written == bare / "audit.json" and json.loads(found.written.read_text())["images_of"] == "noise"
    assert by_name(found.audit)["task-pure batches"].passed is None
    found = audit_saved(bare, CPU, "bf16", 6, str(pictures))
    assert found.audit.passed and found.audit.images == 6 and found.audit.tasks == 3
    assert json.loads((bare / "audit.json").read_text())["precision"] == "bf16"
    assert load_model(bare).class_names  # it still is a model


def test_other_classes_are_strangers_and_nothing_but_strangers_is_refused(
    pictures: Path, folder: Path, tmp_path: Path
) -> None:
    partly = Path(shutil.copytree(pictures, tmp_path / "partly"))
    (partly / "class5").rename(partly / "zebra")
    outcome = audit_saved(folder, CPU, data=str(partly)).audit
    assert outcome.passed and outcome.images == 10 and "not learned yet" in by_name(outcome)["unseen classes"].question
    for label in range(5):
        (partly / f"class{label}").rename(partly / f"other{label}")
    with pytest.raises(UserError, match=r"no test image of the classes that the model knows \(class0, class1"):
        audit_saved(folder, CPU, data=str(partly))


def test_unreadable_images_are_told_unless_they_may_be_skipped(pictures: Path, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(pictures, tmp_path / "spoiled"))
    data = {"benchmark": str(spoiled), "tasks": 3, "skip_unreadable": True}
    run = train.train(config_for(spoiled, {"name": "lda"}, data=data), tmp_path / "run", "cpu")
    test = train.prepare(run.config, CPU, SILENT).scorer.images.names
    (spoiled / test[0]).write_bytes(b"no image")
    assert audit_saved(run.folder, CPU).audit.images == 11
    with pytest.raises(UserError, match=r"1 image\(s\) cannot be read, repair or remove them: class0/"):
        audit_saved(run.folder, CPU, data=str(spoiled))


# The command

Command = Callable[..., Any]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The body of the command: its exit code and what it printed."""
    monkeypatch.setenv("COLUMNS", "140")

    def call(target: object = None, method: str | None = None, every: bool = False, **given: Any) -> tuple[int, str]:
        code = 0
        capsys.readouterr()
        try:
            text = None if target is None else str(target)
            cmd_audit.audit(text, method, every, **{"device": "cpu", **given})
        except typer.Exit as end:
            code = end.exit_code
        return code, capsys.readouterr().out

    return call


TINY_SETTINGS = ["backbone.name=test_vit", "weights=random", "image_size=32", "tasks=3"]


def test_a_clean_run_is_shown_with_its_tolerance(command: Command, folder: Path) -> None:
    code, out = command(folder, images=6)
    assert code == 0 and f"{folder} (probprompt): 6 images of" in out and f"proof: {folder / 'run.json'}" in out
    assert "predictions depend on their own image alone" in out and "LEAK" not in out
    assert all(name in out for name in CHECKS[:-1])
    assert "Measured in fp32 on cpu. A leak: the logits of any image differ by more than 0.001 of their spread" in out
    code, out = command(folder, precision="bf16", images=3)
    assert code == 0 and "3 images of" in out
    assert "Measured in bf16 on cpu. A leak: the logits of more than 10% of the images (and of more than one)" in out
    assert Run.open(folder).record["audit"]["precision"] == "bf16"


def test_a_leaking_run_is_told_with_exit_code_1_and_recorded(command: Command, pictures: Path, tmp_path: Path) -> None:
    run = train.train(config_for(pictures, {"name": "l2p", "batchwise": True}), tmp_path / "run", "cpu")
    code, out = command(run.folder, images=6)
    audited = run.record["audit"]
    assert code == 1 and f"LEAK: {', '.join(audited['leaks'])}" in out
    assert audited["passed"] is False and "batch size" in audited["leaks"]
    assert "batchwise: the images of a minibatch vote on their prompts" in out and audited["marks"]


def test_a_method_is_trained_and_audited(command: Command, pictures: Path, tmp_path: Path) -> None:
    code, out = command(pictures, "apt", assignments=TINY_SETTINGS, images=4, out=tmp_path / "proof.json")
    written = json.loads((tmp_path / "proof.json").read_text())
    assert code == 0 and "apt: done, independent" in out and f"proof: {tmp_path / 'proof.json'}" in out
    assert written["subject"] == "apt" and [check["name"] for check in written["checks"]] == CHECKS
    assert written["method"]["name"] == "apt" and written["images_of"] == f"{pictures} (test)"
    code, out = command(pictures, "l2p", assignments=[*TINY_SETTINGS, "batchwise=true"], images=6)
    assert code == 1 and "l2p: done, leaks: batch size, batch mates" in out


def test_all_methods_are_shown_in_one_table(
    command: Command, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: methods.registered()[name] for name in ("l2p", "joint", "lda")}
    monkeypatch.setattr(methods, "registered", lambda: known)
    code, out = command(pictures, every=True, assignments=TINY_SETTINGS, images=4, out=tmp_path / "all.json")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split() and line.split()[0] in known}
    assert code == 0 and rows["l2p"] == ["ok"] * 10
    assert rows["joint"] == ["ok"] * 4 + ["-", "ok", "-", "ok", "ok", "-"]
    assert rows["lda"] == ["ok"] * 6 + ["-"] + ["ok"] * 3
    assert [part["subject"] for part in json.loads((tmp_path / "all.json").read_text())] == list(known)
    del known["l2p"]
    monkeypatch.setattr(Learner, "check", lambda learner, task: learner.trained.grow(1))
    code, out = command(pictures, every=True, assignments=TINY_SETTINGS, images=4)
    assert code == 1 and "LEAK: joint\n" in out  # a head in closed form has no rows to begin with


def test_mistakes_are_told(command: Command, pictures: Path, folder: Path, tmp_path: Path) -> None:
    for given, message in (
        ({}, "name what to audit: the folder of a run or of a model, or --method NAME, or --all"),
        ({"target": "emoji-r"}, "emoji-r is not the folder of a run or of a model; .* --method NAME"),
        ({"target": tmp_path}, "holds no model"),
        ({"target": folder, "assignments": ["epochs=2"]}, "--set goes with --method or --all"),
        ({"method": "l2p", "every": True}, "exclude each other"),
        ({"method": "l2p", "data": "x"}, "--data goes with a saved model"),
        ({"method": "l3p"}, "no method is called 'l3p': did you mean 'l2p'"),
        ({"target": "nowhere", "method": "l2p"}, "'nowhere' is neither a benchmark nor a folder"),
        ({"target": folder, "device": "tpu"}, "no device is called 'tpu'|not supported"),
        ({"target": folder, "data": str(tmp_path / "none")}, "is neither a benchmark nor a folder"),
    ):
        with pytest.raises(UserError, match=message):
            command(**given)
    assert "audit" not in Run.open(folder).record
