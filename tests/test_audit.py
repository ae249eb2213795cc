"""The audit: what is independent passes, published mistakes and every kind of leak fail, and the proof is written."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import probprompt
from probprompt import methods
from probprompt.backbones.vit import FrozenViT
from probprompt.config import parse_config
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
PASSES = {"outputs", "repeated", "nothing told", "future classes"}  # whatever is wrong in published code
LEGACY = [  # published mistakes that show at evaluation
    {"name": name, option: True}
    for name, kind in methods.registered().items()
    for option in ("batchwise", "legacy_reshape")
    if option in kind.Config.model_fields
]


def config_for(pictures: Path, method: dict[str, Any] | str, **groups: Any) -> Any:
    data = {"benchmark": str(pictures), "tasks": 3, **groups.pop("data", {})}
    base = {"backbone": TINY, "training": {"epochs": 1, "batch_size": 8}, "alignment": {"epochs": 1}}
    head = {"projections": 40} if methods.find(methods.parse_config(method).name).preferred_head == "ridge" else {}
    return parse_config({**base, "data": data, "method": method, "head": head, **groups})


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
    for name in leaks:
        assert (checks[name].worst or 0) > (500 if name == "prompts" else 20) * TOLERANCES["fp32"].difference
    assert found.about["marks"] == list(methods.parse_config(method).marks()) != []


def test_there_are_published_mistakes_to_find() -> None:
    names = [method["name"] for method in LEGACY]
    assert {"l2p", "l2p++", "deep-l2p++"} <= set(names) and names.count("dual-prompt") == 2


def test_noise_of_each_image_is_independent_and_comes_from_its_pixels(proved: Callable[..., AuditReport]) -> None:
    outcome = proved({"name": "probprompt", "evaluation": "image"}).audit
    assert outcome.passed and by_name(outcome)["prompts"].passed and by_name(outcome)["future classes"].worst == 0
    assert outcome.spread != proved({"name": "probprompt"}).audit.spread


@pytest.mark.parametrize("name", ["probprompt", "ft"])
def test_methods_are_independent_in_bf16(proved: Callable[..., AuditReport], name: str) -> None:
    outcome, exact = proved({"name": name}, "bf16").audit, proved({"name": name}).audit
    assert outcome.passed and outcome.precision == "bf16" and outcome.tolerance == TOLERANCES["bf16"]
    checks = by_name(outcome)
    assert checks["batch size"].tolerance == TOLERANCES["bf16"].difference
    assert checks["prompts"].tolerance in (None, TOLERANCES["fp32"].difference)
    assert outcome.spread != exact.spread  # it did compute in another precision
    assert checks["future classes"] == by_name(exact)["future classes"]


def test_published_mistakes_fail_in_bf16(proved: Callable[..., AuditReport]) -> None:
    """However little a prompt does to the logits, it is compared by itself."""
    outcome = proved({"name": "deep-l2p++", "batchwise": True}, "bf16").audit
    assert "prompts" in outcome.leaks and not set(outcome.leaks) & PASSES


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


def own_query(toy: Toy, query: Tensor) -> Tensor:
    """A rule without a leak."""
    return query


COMPANY = {"batch size", "batch mates", "unseen classes", "prompts"}
RULES: dict[str, tuple[Rule, set[str], set[str]]] = {
    "own query": (own_query, set(), set(CHECKS)),
    "batch mean": (lambda toy, query: query.mean(0) + query, COMPANY | {"task-pure batches"}, {"order", "repeated"}),
    "largest of the batch": (lambda toy, query: query - query.amax(0), COMPANY, {"order", "repeated"}),
    "batch size": (lambda toy, query: query * len(query), COMPANY, {"order", "repeated"}),
    "place": (lambda toy, query: query + torch.arange(len(query))[:, None], COMPANY | {"order"}, {"repeated"}),
    "neighbour": (lambda toy, query: query + query.roll(1, 0), COMPANY | {"order"}, {"repeated"}),
    "memory": (lambda toy, query: query + toy.asked / 10, {"repeated"}, set()),
    "noise": (lambda toy, query: query + torch.randn_like(query), {"repeated", "batch size", "prompts"}, set()),
}


def tiny() -> FrozenViT:
    """Two blocks."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=0)
    return FrozenViT(vit)


@pytest.fixture(scope="module")
def backbone() -> FrozenViT:
    return tiny()


def model_of(backbone: FrozenViT, rule: Rule = own_query) -> PromptedModel:
    head = LinearHead(backbone.width, 3).grow(5)
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

    clean = model_of(backbone)
    model = Telling(clean.backbone, clean.method, clean.head)
    drawn = Context(noise=Noise(torch.tensor([1])), first=2)
    for told, names in (
        *((Context(), ""), (Context(task=0), "task"), (Context(labels=torch.zeros(1)), "labels")),
        *((drawn, "first, noise"), (Context(training=True), "training")),
    ):
        model.told = told
        outcome = audit(model, pictures_of(4, 1), torch.zeros(4), 5)
        assert outcome.leaks == (("nothing told",) if names else ())
        assert by_name(outcome)["nothing told"].note == (f"the method was given: {names}" if names else "")
    assert "prompts" not in vars(model.method)  # left as it was


def test_logits_of_unknown_classes_leak_and_some_checks_do_not_apply(backbone: FrozenViT) -> None:
    outcome = audit_toy(backbone, own_query, classes=4)
    assert outcome.leaks == ("outputs",) and by_name(outcome)["outputs"].note == "5 logits for 4 classes"
    outcome = audit(model_of(backbone), pictures_of(5, 1), torch.zeros(5), 5)
    check = by_name(outcome)["task-pure batches"]
    assert check.passed is None and check.worst is None and check.note.startswith("not applicable")
    assert outcome.passed and "noise" in by_name(outcome)["unseen classes"].note


def test_what_cannot_be_audited_is_said(backbone: FrozenViT) -> None:
    wide = tiny()
    wide.model.double()
    for vit, images, message in (
        (backbone, pictures_of(1, 1), "at least 2 images, got 1"),
        (backbone, pictures_of(3, 1) * torch.nan, "not finite"),
        (wide, pictures_of(3, 1), r"torch\.float64.*float32 or bfloat16"),
    ):
        with pytest.raises(UserError, match=message):
            audit(model_of(vit), images, torch.zeros(len(images)), 5)


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
    for count, share, allowed in ((40, 0.0, 0), (40, 0.1, 4), (4, 0.1, 1)):
        for beyond in (allowed, allowed + 1):
            found = torch.zeros(count, 2)
            found[:beyond] += 1
            check = compare("a", "b", [found], torch.zeros(count, 2), 1.0, Tolerance(0.5, share))
            assert check.passed == (beyond == allowed)


def test_what_is_no_number_and_another_number_of_logits_are_leaks() -> None:
    expected = torch.zeros(2, 3)
    for value in (torch.nan, torch.inf):
        found = expected.clone()
        found[1, 2] = value
        check = compare("a", "b", [found], expected, 1.0, Tolerance(0.1))
        assert check.passed is False and check.share == 0.5
        json.dumps(vars(check), allow_nan=False)
    check = compare("a", "b", [torch.zeros(2, 4)], expected, 1.0, Tolerance(0.1))
    assert check.passed is False and check.note == "4 logits instead of 3"


@pytest.mark.parametrize(
    ("known", "future"), [("classes", "none"), ("images", "none"), ("tasks", "another"), ("pixels", "another")]
)
def test_knowing_the_future_is_found(pictures: Path, known: str, future: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Learner.begin

    def begin(learner: Learner, task: TaskImages) -> None:
        original(learner, task)
        head, images = learner.trained, learner.images
        if known == "classes" and task.index == 0:  # as published: a head for all that will ever come
            head.grow(int(images.labels.max()) + 1 - task.classes)
        seen: dict[str, Any] = {"images": len(images.labels), "pixels": images.store.pixels.float().mean()}
        seen["tasks"] = len(learner.config.data.model_dump()["tasks"])
        with torch.no_grad():
            head.weight[task.first :] *= 1 + seen.get(known, 0) / 1000

    monkeypatch.setattr(leak_audit, "_FUTURES", ("as it is", future))
    monkeypatch.setattr(Learner, "begin", begin)
    tasks = ("class3", "class1"), ("class2", "class0"), ("class5",), ("class4",)
    outcome = audit_method(config_for(pictures, "linear-probe", data={"tasks": tasks}), CPU, count=2).audit
    assert set(outcome.leaks) == {"future classes"} | ({"outputs"} if known == "classes" else set())


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
    record = Run.open(folder).record.to_json()
    written = record.pop("audit")
    assert record == run.record.to_json() and found.written == folder / "run.json"
    assert written == json.loads(json.dumps(found.to_json())) and written["passed"] is True
    assert written["images"] == 6 and written["tasks"] == 3 and written["classes"] == 6
    assert written["images_of"] == f"{run.config.data.benchmark} (test)"
    assert written["model"] == json.loads((folder / "model" / "model.json").read_text())["tensors"]
    assert written["versions"] == record["versions"] and written["hardware"]["device"] == "cpu"
    assert written["tolerance"] == TOLERANCES["fp32"].difference and written["precision"] == "fp32"
    assert [check["name"] for check in written["checks"]] == CHECKS[:-1]
    assert audit_saved(folder, CPU, count=6).audit == found.audit  # and again


def test_the_images_are_those_the_run_was_evaluated_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def watched(*given: Any) -> Audit:
        taken.extend(given)
        return audit(*given)

    monkeypatch.setattr(leak_audit, "audit", watched)
    audit_saved(folder, CPU)
    model, images, tasks, classes, strangers, *_ = taken
    scorer = train.prepare(Run.open(folder).config, CPU, SILENT).scorer
    assert torch.equal(images, scorer.viewer.evaluation(scorer.images.store, torch.arange(12)))
    assert tasks.tolist() == [0] * 4 + [1] * 4 + [2] * 4 and classes == 6 and strangers is None
    assert torch.equal(load_model(folder).model.predict(images), model.predict(images))


@pytest.mark.parametrize(
    ("method", "groups", "source", "tasks"),
    [
        ("nearest-mean", {"data": {"tasks": 2, "validation": 0.3, "stored_size": "full"}}, "validation", 2),
        ("joint", {}, "test", 1),
        ("vq-prompt", {"head": {"kind": "ridge", "projections": 30}}, "test", 3),
    ],
    ids=["held-out images", "no tasks", "prompts under a head in closed form"],
)
def test_runs_of_every_kind_are_audited(
    pictures: Path, tmp_path: Path, method: str, groups: dict[str, Any], source: str, tasks: int
) -> None:
    run = train.train(config_for(pictures, method, **groups), tmp_path / "run", "cpu")
    found = audit_saved(run.folder, CPU, count=4)
    checks = by_name(found.audit)
    assert found.audit.passed and found.about["images_of"] == f"{pictures} ({source})" and found.audit.tasks == tasks
    assert checks["task-pure batches"].passed == (True if tasks > 1 else None)
    assert checks["prompts"].passed == (True if method == "vq-prompt" else None)


def test_a_run_that_is_not_finished_meets_its_own_future(pictures: Path, tmp_path: Path) -> None:
    workshop = train.prepare(config_for(pictures, "nearest-mean"), CPU, SILENT)
    run = Run.create(tmp_path / "run", train.describe(workshop, "run"))
    under_way = train.RunLoop(run, workshop, None, SILENT, None)
    for task in workshop.tasks[:2]:
        under_way.learn(task)
    outcome = audit_saved(run.folder, CPU).audit
    assert outcome.passed and outcome.classes == 4 and outcome.tasks == 2
    assert by_name(outcome)["unseen classes"].question == "alone, and with images of classes not learned yet"


def test_a_run_in_the_hands_of_another_is_left_alone(folder: Path) -> None:
    with Run.open(folder).locked(), pytest.raises(UserError, match="Another process is using"):
        audit_saved(folder, CPU)


def test_changed_images_are_refused_unreadable_ones_skipped(pictures: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    config = config_for(moved, "nearest-mean", data={"skip_unreadable": True})
    run = train.train(config, tmp_path / "run", "cpu")
    broken = moved / train.prepare(run.config, CPU, SILENT).scorer.images.names[0]
    content = broken.read_bytes()
    broken.write_bytes(b"no image")
    assert audit_saved(run.folder, CPU).audit.images == 11
    with pytest.raises(UserError, match=r"Cannot read 1 image.*class0/"):
        audit_saved(run.folder, CPU, data=str(moved))
    broken.write_bytes(content)
    broken.rename(broken.with_name("x.png"))
    with pytest.raises(UserError, match="--data FOLDER"):
        audit_saved(run.folder, CPU)
    assert audit_saved(run.folder, CPU, count=3, data=str(moved)).audit.passed


def test_a_bare_model_is_audited_with_noise_or_a_folder(pictures: Path, run: Run, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(run.folder / "model", tmp_path / "bare"))
    found = audit_saved(bare, CPU, count=3)
    assert found.audit.passed and found.about["images_of"] == "noise" and found.audit.images == 3
    assert found.written == bare / "audit.json" and json.loads(found.written.read_text())["images_of"] == "noise"
    assert by_name(found.audit)["task-pure batches"].passed is None
    found = audit_saved(bare, CPU, "bf16", 6, str(pictures))
    assert found.audit.passed and found.audit.images == 6 and found.audit.tasks == 3
    assert json.loads((bare / "audit.json").read_text())["precision"] == "bf16"
    assert load_model(bare).class_names  # it still is a model


def test_other_classes_are_strangers_and_some_are_needed(pictures: Path, folder: Path, tmp_path: Path) -> None:
    partly = Path(shutil.copytree(pictures, tmp_path / "partly"))
    (partly / "class5").rename(partly / "zebra")
    outcome = audit_saved(folder, CPU, data=str(partly)).audit
    assert outcome.passed and outcome.images == 10 and "not learned yet" in by_name(outcome)["unseen classes"].question
    for label in range(5):
        (partly / f"class{label}").rename(partly / f"other{label}")
    with pytest.raises(UserError, match=r"\(class0, class1.*--data"):
        audit_saved(folder, CPU, data=str(partly))


Command = Callable[..., Any]


@pytest.fixture
def command(probprompt: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The audit, by default on a CPU."""
    monkeypatch.setenv("COLUMNS", "140")
    return lambda *arguments: probprompt("audit", "--device", "cpu", *arguments)


QUICK = ("--set", "backbone.name=test_vit", "--set", "weights=random", "--set", "image_size=32", "--set", "tasks=3")


def test_a_clean_run_is_shown_with_its_tolerance(command: Command, folder: Path) -> None:
    code, out, _ = command(folder, "--num-images", 6)
    assert code == 0 and f"{folder} (probprompt): 6 images of" in out and f"Wrote {folder / 'run.json'}." in out
    assert "LEAK" not in out and "one-task batches" in out
    assert "Measured in fp32 on cpu." in out and "any image differ by more than 0.001" in out
    code, out, _ = command(folder, "--precision", "bf16", "--num-images", 3)
    assert code == 0 and "3 images of" in out and "Measured in bf16 on cpu." in out and "more than 10%" in out
    assert Run.open(folder).record.audit["precision"] == "bf16"


def test_a_leaking_run_is_told_with_exit_code_1_and_recorded(command: Command, pictures: Path, tmp_path: Path) -> None:
    run = train.train(config_for(pictures, {"name": "l2p", "batchwise": True}), tmp_path / "run", "cpu")
    code, out, _ = command(run.folder, "--num-images", 6)
    audited = run.record.audit
    assert code == 1 and re.search("LEAK: .*batch size, other images", out)
    assert audited["passed"] is False and "batch size" in audited["leaks"]
    assert audited["marks"] and audited["marks"][0] in out


def test_a_method_is_trained_and_audited(command: Command, pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "proof.json"
    code, out, _ = command(pictures, "--method", "apt", *QUICK, "--num-images", 4, "--out", file)
    written = json.loads(file.read_text())
    assert code == 0 and "apt: done, no leaks" in out and f"Wrote {file}." in out
    assert written["subject"] == "apt" and [check["name"] for check in written["checks"]] == CHECKS
    assert written["method"]["name"] == "apt" and written["images_of"] == f"{pictures} (test)"
    code, out, _ = command(pictures, "--method", "l2p", *QUICK, "--set", "batchwise=true", "--num-images", 6)
    assert code == 1 and "l2p: done, leaks: batch size, other images" in out


def test_a_table_of_methods(command: Command, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: methods.registered()[name] for name in ("l2p", "joint", "lda")}
    monkeypatch.setattr(methods, "registered", lambda: known)
    code, out, _ = command(pictures, "--all-methods", *QUICK, "--num-images", 4, "--out", tmp_path / "all.json")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split() and line.split()[0] in known}
    assert code == 0 and rows["l2p"] == ["ok"] * 10
    assert rows["joint"] == ["ok"] * 4 + ["-", "ok", "-", "ok", "ok", "-"]
    assert rows["lda"] == ["ok"] * 6 + ["-"] + ["ok"] * 3
    assert [part["subject"] for part in json.loads((tmp_path / "all.json").read_text())] == list(known)
    del known["l2p"]
    monkeypatch.setattr(Learner, "check", lambda learner, task: learner.trained.grow(1))
    code, out, _ = command(pictures, "--all-methods", *QUICK, "--num-images", 4)
    assert code == 1 and "LEAK: joint\n" in out  # a head in closed form has no rows to begin with


def test_mistakes_are_told(command: Command, folder: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((), "--method NAME, or --all-methods"),
        (("emoji-r",), "--method NAME"),
        ((tmp_path,), "No model found"),
        ((folder, "--set", "epochs=2"), "remove --set"),
        (("--method", "l2p", "--all-methods"), "cannot be combined"),
        (("--method", "l2p", "--data", "x"), "--data is for saved models"),
        (("--method", "l3p"), "'l2p'"),
        (("nowhere", "--method", "l2p"), "'nowhere'"),
        ((folder, "--device", "tpu"), "tpu"),
        ((folder, "--data", tmp_path / "none"), "none"),
    ):
        code, _, said = command(*arguments)
        assert code == 2 and message in said, arguments
    assert not Run.open(folder).record.audit


def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="method=NAME"):
        probprompt.audit()
    with pytest.raises(UserError, match="config= needs method="):
        probprompt.audit(tmp_path, config={"training": {"epochs": 1}})
    with pytest.raises(UserError, match="data= needs a saved model"):
        probprompt.audit("emoji-r", method="lda", data=str(tmp_path))
