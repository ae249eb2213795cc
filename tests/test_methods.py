"""Every registered method, on backbones of different shapes, keeps every promise that the engine and users rely on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from learner_helpers import contexts_of, quiet, teach, train
from probprompt import methods, presets
from probprompt.backbones.pretrained import LoadedBackbone, Preprocessing
from probprompt.backbones.vit import FrozenViT
from probprompt.config import RunConfig, parse_config
from probprompt.engine import build, saved_model
from probprompt.errors import UserError
from probprompt.heads import HEADS, make_head
from probprompt.heads.closed_form import ClosedFormHead
from probprompt.methods import EVALUATION, Context, Prompted, Shape
from probprompt.progress import SILENT, ProgressCallback
from probprompt.prompts import ClassTokenShift, Prefix, Tokens
from probprompt.randomness import Noise
from probprompt.runs import checkpoint
from probprompt.runs import train as runs_train
from probprompt.runs.run import Run, config_hash

CPU = torch.device("cpu")
METHODS = list(methods.registered())
BASELINES = {"ft", "ft++", "joint"}
BACKBONES: dict[str, dict[str, Any]] = {
    "narrow": {"embed_dim": 32, "depth": 5, "num_heads": 4},
    "registers": {"embed_dim": 48, "depth": 6, "num_heads": 3, "reg_tokens": 2, "no_embed_class": True},
}


def build_backbone(kind: str) -> LoadedBackbone:
    """A tiny ViT with weights away from their start, so that no layer does next to nothing."""
    torch.manual_seed(0)
    model = VisionTransformer(img_size=16, patch_size=8, num_classes=0, **BACKBONES[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    preprocessing = Preprocessing(16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return LoadedBackbone(FrozenViT(model.eval()), preprocessing, kind, "made here", "0" * 64)


@pytest.fixture(params=BACKBONES)
def kind(request: pytest.FixtureRequest, loading: None) -> str:
    """The name of a backbone."""
    return str(request.param)


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load these backbones by their names."""
    monkeypatch.setattr(build, "load_backbone", lambda name, *_: build_backbone(name))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """Six classes of six small pictures."""
    folder = tmp_path_factory.mktemp("few")
    for source in sorted(pictures.glob("*/[0-5].png")):
        target = folder / source.parent.name / source.name
        target.parent.mkdir(exist_ok=True)
        with Image.open(source) as image:
            image.resize((16, 16)).save(target)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Run]:
    """Runs that several tests look at, made when first asked for."""
    return {}


@pytest.fixture
def trained(
    finished: dict[tuple[str, str], Run], few: Path, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Run]:
    """A run of a method on this backbone: three tasks of unequal size, one of them a single class."""

    def get(name: str) -> Run:
        key = (name, kind)
        if key not in finished:
            out = tmp_path_factory.mktemp("runs") / "run"
            finished[key] = runs_train.train(configure(few, kind, name), out)
        return finished[key]

    return get


def restored(run: Run) -> runs_train.TrainingSetup:
    """A run's end, from its checkpoint."""
    workshop = runs_train.prepare(run.config, CPU, SILENT)
    saved = checkpoint.load_checkpoint(run.checkpoint, config_hash(run.config), CPU)
    saved.restore(workshop.learner, workshop.tasks)
    return workshop


def configure(few: Path, kind: str, method: str, **groups: dict[str, Any]) -> RunConfig:
    base: dict[str, Any] = {
        "data": {"benchmark": str(few), "tasks": [3, 1, 2]},
        "backbone": {"name": kind},
        "method": {"name": method},
        "training": {"epochs": 2, "batch_size": 4, "head_lr": 1e-3 if method in BASELINES else 0.01},
        "alignment": {"epochs": 2, "lr": 0.01},
    }
    if method == "ft++":  # by itself it cannot learn a class alone
        base["alignment"] = {**base["alignment"], "enabled": True}
    if groups.get("head", {}).get("kind", methods.find(method).preferred_head) == "ridge":
        base["head"] = {"projections": 50}
    return parse_config({name: {**base.get(name, {}), **groups.get(name, {})} for name in {**base, **groups}})


def learn(config: RunConfig, tasks: int | None = None) -> runs_train.TrainingSetup:
    """Learn the first tasks."""
    workshop = runs_train.prepare(config, CPU, ProgressCallback())
    teach(workshop, tasks)
    return workshop


def predictions(workshop: runs_train.TrainingSetup) -> Tensor:
    return workshop.scorer.logits(torch.cat([task.rows for task in workshop.test_tasks]))


def some_images(workshop: runs_train.TrainingSetup) -> Tensor:
    return workshop.scorer.viewer.evaluation(workshop.scorer.images.store, torch.arange(6))


def assert_predicted_everywhere(run: Run, workshop: runs_train.TrainingSetup, by_hand: Tensor) -> None:
    """By the model, the scorer and the saved model."""
    images = some_images(workshop)
    torch.testing.assert_close(workshop.learner.model.predict(images), by_hand)
    torch.testing.assert_close(workshop.scorer.logits(torch.arange(6)), by_hand)
    torch.testing.assert_close(saved_model.load_model(run.folder).model.predict(images), by_hand)


@pytest.mark.parametrize("name", METHODS)
def test_forward_and_backward(name: str, few: Path, kind: str) -> None:
    """Prompts fit the backbone, the loss is finite, and every parameter that should learn gets a gradient."""
    workshop = runs_train.prepare(configure(few, kind, name), CPU, SILENT)
    learner, model, task = workshop.learner, workshop.learner.model, workshop.tasks[0]
    learner.begin(task)
    labels = torch.arange(4) % task.classes
    context = Context(True, 0, labels, 0, Noise(torch.tensor([0])))
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    features, loss = model.features(images, context)
    assert features.shape == (4, model.backbone.width) and features.dtype == torch.float32
    own = model.method.feature_loss(features, context)
    total = learner.trained(features)[:, : task.classes].logsumexp(dim=1).sum()
    for part in (loss, own):
        if part is not None:
            assert part.shape == () and bool(part.isfinite())
            total = total + part
    if not model.static:
        total.backward()
        idle = [n for n, p in model.method.named_parameters() if p.requires_grad and p.grad is None]
        assert not idle, f"no gradient reaches {idle}"
    prompted = model.method.prompts(model.query(images), EVALUATION)
    assert prompted.loss is None, "at evaluation there is no loss"
    for prompt in prompted.prompts.values():
        assert isinstance(prompt, Prefix | Tokens | ClassTokenShift)


@pytest.mark.parametrize("name", METHODS)
def test_only_the_declared_parameters_change(name: str, few: Path, kind: str) -> None:
    """The backbone stays as it is to the bit, unless the method says that it trains it; frozen parts stay, too."""
    workshop = learn(configure(few, kind, name), 1)
    model, learner = workshop.learner.model, workshop.learner
    before = model.backbone.fingerprint()
    if model.method.joint:
        assert before != build_backbone(kind).model.fingerprint(), "all tasks are one, and it trains the backbone"
        return
    task = workshop.tasks[2]
    # Task 2 of a single class may be learned by the alignment alone: look at one that trains.
    train(learner, workshop.tasks[1])
    learner.finish(workshop.tasks[1], quiet)
    before = model.backbone.fingerprint()
    learner.begin(task)
    if not learner.epochs(task):
        assert not list(model.method.parameters()), "a method with parameters trains"
        return
    frozen = {n: p.detach().clone() for n, p in model.method.named_parameters() if not p.requires_grad}
    free = {n: p.detach().clone() for n, p in model.method.named_parameters() if p.requires_grad}
    rows = learner.trained.weight.detach().clone()
    optimiser = learner.optimizer(task)
    learner.train_epoch(task, 0, optimiser, quiet)
    now = dict(model.method.named_parameters())
    assert all(torch.equal(now[n], value) for n, value in frozen.items())
    unchanged = [n for n, value in free.items() if torch.equal(now[n], value)]
    assert not unchanged, f"declared, but never learned: {unchanged}"
    assert (model.backbone.fingerprint() != before) is model.method.trains_backbone
    assert not torch.equal(learner.trained.weight[task.first :], rows[task.first :]) or not model.head.trained
    if model.method.masked and model.head.trained:
        assert torch.equal(learner.trained.weight[: task.first], rows[: task.first]), "old rows moved in training"


@pytest.mark.parametrize("name", METHODS)
def test_predictions_of_a_finished_run(name: str, trained: Callable[[str], Run]) -> None:
    """Three tasks of unequal size, one of a single class, were learned: saved, loaded, alone and told nothing."""
    run = trained(name)
    workshop, loaded = restored(run), saved_model.load_model(run.folder)
    model, images = workshop.learner.model, some_images(workshop)
    expected = model.predict(images)
    assert expected.shape == (6, 6) and bool(expected.isfinite().all())
    if model.method.trains_backbone:  # other kernels run where weights may learn
        torch.testing.assert_close(loaded.model.predict(images), expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(loaded.model.predict(images), expected)
    assert len(loaded.class_names) == 6
    assert loaded.model.static, "a loaded model must not learn by accident"
    alone = torch.cat([model.predict(image[None]) for image in images])
    torch.testing.assert_close(expected, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(expected, model.predict(images.flip(0)).flip(0), rtol=1e-4, atol=1e-4)
    contexts = contexts_of(model.method)
    predictions(workshop)
    assert contexts
    for context in contexts:
        assert (context.training, context.task, context.labels, context.noise) == (False, None, None, None)


class CrashError(BaseException):
    """The process dies here."""


@dataclass
class Bomb(ProgressCallback):
    """Lets a run die in a given task: after so many steps, or else before it is scored."""

    stage_name: str
    steps: int
    current: str = ""

    def stage(self, description: str, total: int) -> Any:
        self.current = description
        return super().stage(description, total)

    def advance(self, steps: int) -> None:
        if self.current == self.stage_name:
            self.steps -= steps
            if self.steps < 0:
                raise CrashError

    def describe(self, text: str) -> None:
        if self.current == self.stage_name and text == "evaluating":
            raise CrashError


@pytest.mark.parametrize("name", METHODS)
def test_interrupted_equals_uninterrupted(name: str, trained: Callable[[str], Run], tmp_path: Path) -> None:
    """The process dies in the middle of the last task, and again just before the end."""
    whole = trained(name)
    last = "task 1 of 1" if methods.find(name).joint else "task 3 of 3"
    with pytest.raises(CrashError):
        runs_train.train(whole.config, tmp_path / "broken", progress=Bomb(last, 3))
    with pytest.raises(CrashError):
        runs_train.resume(tmp_path / "broken", progress=Bomb(last, 1000))
    resumed = runs_train.resume(tmp_path / "broken")
    assert (whole.folder / "accuracy.json").read_bytes() == (resumed.folder / "accuracy.json").read_bytes()
    one, other = ({path.name: path.read_bytes() for path in run.model.iterdir()} for run in (whole, resumed))
    assert one == other


@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_tasks_need_not_be_known(name: str, few: Path, kind: str) -> None:
    """What is learned of the first tasks is the same, whatever comes later: no method is told the number of tasks."""
    if methods.find(name).joint:
        pytest.skip("joint training knows all tasks: it is the upper bound")
    classes = [f"class{index}" for index in range(6)]
    short = learn(configure(few, kind, name, data={"tasks": [classes[:2], classes[2:4], classes[4:]]}), 2)
    split = [classes[:2], classes[2:4], classes[5:], classes[4:5]]
    longer = learn(configure(few, kind, name, data={"tasks": split}), 2)
    rows = torch.cat([task.rows for task in short.test_tasks[:2]])
    assert torch.equal(short.scorer.logits(rows), longer.scorer.logits(rows))
    assert short.scorer.logits(rows).shape == (len(rows), 4)


@pytest.mark.parametrize("head", sorted(HEADS))
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_with_every_head(name: str, head: str, few: Path, loading: None) -> None:
    workshop = learn(configure(few, "narrow", name, head={"kind": head}))
    assert predictions(workshop).shape == (6, 6)
    model = workshop.learner.model
    if not model.head.trained and not model.method.joint:
        assert model.static, "prompts stay as they are after the first task"


@pytest.mark.parametrize("name", METHODS)
def test_under_a_closed_form_head_nothing_moves_after_the_first_task(name: str, few: Path, loading: None) -> None:
    """The features of an image are the same after every later task, and the head equals the joint solve on them."""
    if methods.find(name).joint:
        pytest.skip("all tasks are one")
    head = {"kind": "ridge", "ridge": 1.0}
    workshop = learn(configure(few, "narrow", name, head=head), 1)
    images, model, learner = some_images(workshop), workshop.learner.model, workshop.learner
    early = model.features(images)[0]
    for task in workshop.tasks[1:]:
        assert train(learner, task) == []
        learner.finish(task, quiet)
    if model.method.trains_backbone:  # other kernels run where weights may learn
        torch.testing.assert_close(model.features(images)[0], early, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(model.features(images)[0], early)
    everything = torch.cat([task.rows for task in workshop.tasks])
    pixels = learner.viewer.evaluation(learner.images.store, everything)
    with torch.no_grad():
        hidden = (model.features(pixels)[0] @ model.head.projection).relu().double()  # type: ignore[operator]
    targets = torch.nn.functional.one_hot(torch.cat([task.labels for task in workshop.tasks])).double()
    gram = hidden.mT @ hidden + torch.eye(hidden.shape[1])
    joint = torch.linalg.solve(gram, hidden.mT @ targets)
    ours = model.predict(pixels).double()
    torch.testing.assert_close(ours, hidden @ joint, rtol=1e-3, atol=1e-3)


def test_fine_tuning_with_masked_logits_refuses_a_class_alone(few: Path, loading: None) -> None:
    with pytest.raises(UserError, match=r"Task 2.*alignment\.enabled"):
        learn(configure(few, "narrow", "ft++", alignment={"enabled": None}))


@pytest.mark.parametrize("preset", presets.NAMES)
@pytest.mark.parametrize("benchmark_name", ("cifar100", "imagenet-r", "cub200", "emoji-r"))
@pytest.mark.parametrize("name", METHODS)
def test_every_preset_is_valid(name: str, benchmark_name: str, preset: str) -> None:
    without_prompts = not presets.has_prompts(methods.find(name))
    if (preset == "flagship" and name != "probprompt") or (preset == "ridge" and without_prompts):
        with pytest.raises(UserError, match=f"The preset '{preset}'"):
            presets.settings(preset, name, benchmark_name)
        return
    config = parse_config(presets.settings(preset, name, benchmark_name))
    assert config.method.name == name and config.preset == preset and config.data.benchmark == benchmark_name
    assert not config.method.marks(), "a preset never repeats a published mistake"
    if preset == "published":
        assert config.backbone.normalization == "unit" or name == "hide-prompt"
        photographs = benchmark_name in ("imagenet-r", "cub200")
        assert config.data.stored_size == ("full" if photographs else None), "crops are cut from the whole image"
        assert config.backbone.precision == "fp32"
        google = name in ("l2p", "dual-prompt", "hide-prompt")
        assert config.data.center_crop is (True if google else None)


def test_published_hide_prompt_trains_as_its_scripts_state() -> None:
    found = {name: parse_config(presets.settings("published", "hide-prompt", name)) for name in ("cifar100", "cub200")}
    cifar, cub = found["cifar100"].training, found["cub200"].training
    rates = {(one.head_lr * one.prompt_lr_scale, one.schedule) for one in (cifar, cub)}
    assert rates == {(0.03 * 24 / 256, "step")} and cub.head_lr == 10 * cifar.head_lr == 0.03 * 24 / 256
    assert (cifar.augmentation, cifar.crop_scale) == ("crop+brightness", (0.08, 1.0))
    assert (cub.augmentation, cub.crop_scale) == ("crop", (0.05, 1.0))
    assert parse_config(presets.settings("published", "hide-prompt", "imagenet-r")).training.schedule == "cosine"


def test_matched_is_one_protocol_for_all() -> None:
    """Budget, augmentation, input and head do not depend on the method; rates of prompts may."""
    shared = []
    for name in METHODS:
        config = parse_config(presets.settings("matched", name, "emoji-r"))
        training = config.training.model_dump(exclude={"prompt_lr_scale", "head_lr"})
        shared.append((config.data, config.backbone, tuple(sorted(training.items()))))
        if name not in BASELINES:
            assert config.alignment == parse_config(presets.settings("matched", "probprompt", "emoji-r")).alignment
        if methods.find(name).learns:
            assert config.head.kind == "linear"
    assert all(one == shared[0] for one in shared)


@pytest.mark.parametrize(
    ("name", "head", "layers"),
    (
        *(("probprompt", head, layers) for head, layers in (("ridge", 0), ("lda", 1), ("nearest-mean", 0))),
        *(("l2p", "ridge", 1), ("apt", "lda", 1), ("ranpac", "ridge", 1)),
    ),
)
def test_a_head_may_read_the_query_and_the_blocks_before_the_last(
    name: str, head: str, layers: int, few: Path, loading: None, tmp_path: Path
) -> None:
    """Behind the prompted feature, at every place where it learns or predicts."""
    asks = name in ("probprompt", "l2p")
    wanted = {"kind": head, "with_query": asks, "layers": layers, **({"ridge": 1.0} if head == "ridge" else {})}
    run = runs_train.train(configure(few, "narrow", name, head=wanted), tmp_path / "run")
    workshop = restored(run)
    model, task = workshop.learner.model, workshop.tasks[-1]
    width, images = model.backbone.width, some_images(workshop)
    assert model.head.width == width * (1 + asks + 2 * layers)
    query = model.query(images)
    with torch.no_grad():
        prompts = model.method.prompts(query, EVALUATION).prompts
        read = model.backbone.features(images, prompts, model.method.readout if prompts else "class", layers=layers)
        parts = [read[:, :width], *([query] if asks and query is not None else []), read[:, width:]]
        by_hand = model.head(torch.cat(parts, dim=1))
    assert_predicted_everywhere(run, workshop, by_hand)
    assert workshop.learner.look(task, quiet).shape == (len(task), model.head.width)


@pytest.mark.parametrize("name", ("probprompt", "evo-prompt", "ranpac"))
def test_a_head_may_be_given_the_mean_over_an_image_and_its_mirror_image(
    name: str, few: Path, loading: None, tmp_path: Path
) -> None:
    """At every place where it learns or predicts: an image and its mirror image are then the same to it."""
    plain = {"kind": "ridge", "layers": 1, "ridge": 1.0, "projections": 50}
    run = runs_train.train(configure(few, "narrow", name, head={**plain, "flip_average": True}), tmp_path / "run")
    workshop = restored(run)
    model, task, images = workshop.learner.model, workshop.tasks[-1], some_images(workshop)
    model.head.flip_average = False
    both = (model.look(images) + model.look(images.flip(-1))) / 2
    seen, apart = workshop.learner.look(task, quiet), model.predict(images)
    model.head.flip_average, workshop.learner.loader._frozen = True, None
    by_hand = model.head(both)
    assert_predicted_everywhere(run, workshop, by_hand)
    torch.testing.assert_close(model.predict(images.flip(-1)), by_hand)
    assert not torch.allclose(apart, by_hand)
    assert not torch.allclose(workshop.learner.look(task, quiet), seen)
    once = learn(configure(few, "narrow", name, head=plain)).learner.model
    assert not torch.allclose(once.head(both), by_hand)  # it learned something else too


@pytest.mark.parametrize("name", ("probprompt", "ranpac"))
@pytest.mark.parametrize("head", ("ridge", "lda"))
def test_a_head_may_learn_mirror_images_as_well(name: str, head: str, few: Path, loading: None) -> None:
    """As more images, with their own queries; a prediction looks at the image alone."""
    own = {"ridge": 1.0, "projections": 40} if head == "ridge" else {}
    wanted = {"kind": head, **own, "layers": 1, "with_query": name == "probprompt"}
    workshop = learn(configure(few, "narrow", name, head={**wanted, "flip_augment": True}))
    learner = workshop.learner
    model, store = learner.model, learner.images.store
    by_hand = make_head(workshop.config.head, model.backbone.width, workshop.config.seeds.init)
    assert isinstance(by_hand, ClosedFormHead)
    with torch.no_grad():
        for task in workshop.tasks:
            images = learner.viewer.evaluation(store, task.rows)
            for seen in (images, images.flip(-1)):
                by_hand.learn(model.look(seen), task.labels, 0 if seen is not images else task.classes, task.index)
        torch.testing.assert_close(model.head.weight, by_hand.weight, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(model.predict(images), by_hand(model.look(images)), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(model.predict(images), model.predict(images.flip(-1)))


@pytest.mark.parametrize(
    ("name", "head", "message"),
    (
        ("probprompt", {"kind": "linear", "layers": 1}, "head.layers does not apply to head.kind=linear"),
        (
            "probprompt",
            {"kind": "linear", "flip_augment": True},
            "head.flip_augment does not apply to head.kind=linear",
        ),
        ("probprompt", {"kind": "ridge", "flip_augment": True, "flip_average": True}, "head.flip_augment"),
        (
            "probprompt",
            {"kind": "linear", "flip_average": True},
            "flip_average does not apply to head.kind=linear",
        ),
        ("probprompt", {"kind": "ridge", "layers": 9}, "head.layers is 9"),
        ("probprompt", {"kind": "linear", "with_query": True}, "only to ridge, lda, nearest-mean"),
        ("apt", {"kind": "ridge", "with_query": True}, "queries; apt"),
    ),
    ids=str,
)
def test_what_no_head_could_read_is_refused(
    name: str, head: dict[str, Any], message: str, few: Path, loading: None
) -> None:
    with pytest.raises(UserError, match=message):
        runs_train.prepare(configure(few, "narrow", name, head=head), CPU, SILENT)


@pytest.mark.parametrize(
    ("name", "head"),
    [("linear-probe", "linear"), ("nearest-mean", "nearest-mean"), ("lda", "lda"), ("ranpac", "ridge")],
)
def test_a_control_is_a_head_on_features_that_never_change(name: str, head: str) -> None:
    method, config = methods.find(name), methods.parse_config(name)
    assert method.preferred_head == head and "control" in method.summary
    assert not (method.needs_query or method.needs_summary or method.trains_backbone or method.joint)
    assert parse_config({"method": name}).head.kind == head
    built = method.create(config, Shape(width=4, depth=2), seed=0)
    for context in (EVALUATION, Context(training=True, task=0, labels=torch.tensor([0]))):
        built.begin_task(0, 2)
        assert built.prompts(None, context) == Prompted()
        built.end_task(None)
    assert not built.state_dict() and not any(parameters for parameters, _ in built.groups())
    assert config.model_dump() == {"name": name}
