"""The commands ``train``, ``demo``, ``report``, ``list`` and ``cache``."""

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Argument, Option

import probprompt.cli.console as shared
from probprompt.cli.console import Screen
from probprompt.errors import Interrupted, UserError

_GRACE = 10  # seconds that other processes give the first to say what went wrong


class Listed(StrEnum):
    """What can be listed."""

    methods = "methods"
    benchmarks = "benchmarks"
    backbones = "backbones"


def demo(
    out: Annotated[Path | None, Option(help="Where the runs are written; runs/demo by default.")] = None,
    seed: Annotated[int, Option(min=0, help="Order of classes, initial parameters, batches.")] = 0,
    device: shared.Device = None,
) -> None:
    """Compare three methods on embedded images (2 minutes)."""
    import probprompt.api as api
    from probprompt import distributed, methods, presets
    from probprompt.report.pages import save_overview, write_report

    distributed.refuse_several("the demo")
    screen = Screen()
    folder = out or api.free_folder(Path("runs"), "demo")
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another folder with --out")
    screen.print("20 classes of emoji arrive in 5 tasks; old images are never seen again.")
    screen.print("The test images are drawn in styles that training never shows.\n")
    runs = []
    for method, preset, settings in presets.DEMO:
        screen.title(f"{method}: {methods.find(method).summary}")
        out = folder / method
        with _resumable(out):
            run = api.train(
                "emoji-r", method, preset=preset, config=settings, out=out, seed=seed, device=device, progress=screen
            )
        runs.append(run)
    folders = [run.folder for run in runs]
    picture = save_overview(folders, folder / "overview.png")
    page = write_report(folders, folder / "report.html")
    screen.compare(runs)
    screen.print("All three heads read the same blocks of the backbone. RanPAC has no prompts.")
    screen.print("docs/demo.md explains what this shows and what it does not.\n")
    screen.print(f"picture: {picture}")
    screen.print(f"report: {page}")


def train(
    benchmark: Annotated[
        str | None, Argument(help="A benchmark's name or a folder of class folders.", show_default="emoji-r")
    ] = None,
    method: Annotated[str | None, Option(help="See: probprompt list methods.")] = None,
    preset: shared.Preset = None,
    tasks: shared.Tasks = None,
    test: shared.TestFolder = None,
    backbone: shared.Backbone = None,
    weights: shared.Weights = None,
    epochs: Annotated[int | None, Option(min=1, help="Epochs per task.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Images per step.")] = None,
    seed: Annotated[int | None, Option(min=0, help="All three seeds at once: order, init, data.")] = None,
    order_seed: Annotated[int | None, Option(min=0, help="Order of classes.")] = None,
    init_seed: Annotated[int | None, Option(min=0, help="Initial parameters.")] = None,
    data_seed: Annotated[int | None, Option(min=0, help="Batches, crops and noise.")] = None,
    validate: shared.Validate = False,
    skip_unreadable: shared.SkipUnreadable = False,
    assignments: shared.Assignments = None,
    config: Annotated[Path | None, Option(help="Settings in a TOML file.")] = None,
    out: Annotated[Path | None, Option(help="The run's folder; a new one under runs/ by default.")] = None,
    resume: Annotated[Path | None, Option(metavar="RUN", help="Go on with a run that was stopped.")] = None,
    device: shared.Device = None,
    gpus: Annotated[
        int | None, Option(min=1, help="Train on so many GPUs of this machine: a process each, as by torchrun.")
    ] = None,
    track: Annotated[str | None, Option(help="Send numbers to tensorboard, trackio or wandb.")] = None,
) -> None:
    """Learn a benchmark, or a folder of images, task by task."""
    import probprompt.api as api
    from probprompt import distributed, presets
    from probprompt.config import parse_config

    seeds = {"order": order_seed, "init": init_seed, "data": data_seed}
    given = shared.named_settings(tasks, test, backbone, weights, validate, skip_unreadable)
    given |= {
        "data.benchmark": benchmark,
        "method.name": method,
        "training.epochs": epochs,
        "training.batch_size": batch,
    }
    given |= {f"seeds.{name}": seed if value is None else value for name, value in seeds.items()}
    parsed = None
    with _one_voice():
        if resume:
            if preset:
                raise UserError("--resume goes on with the run's own settings: leave --preset away")
            if out:
                raise UserError("--resume goes on in the run's own folder: leave --out away")
            _refuse_changes(resume, given, assignments or [], config)
            folder = resume
        else:
            parsed = parse_config(presets.resolve(preset, _gather({}, given, assignments or [], config)))
            folder = out or api.default_folder(parsed)
        if gpus is not None and distributed.must_launch(gpus, device):
            more = [] if resume or out else ["--out", str(folder)]
            try:
                distributed.launch(gpus, "-m", "probprompt", *sys.argv[1:], *more)
            except distributed.LostError as loss:
                raise UserError(f"{loss}; {_way_on(folder, f' --gpus {gpus}')}") from None
            return
        screen = Screen()
        with _resumable(folder):
            if parsed:
                run = api.start(parsed, folder, device, screen, track)
            else:
                run = api.resume(folder, device, screen, track)
        if distributed.from_environment().writes:
            screen.show(run)


@contextmanager
def _one_voice() -> Iterator[None]:
    """Let the first of several processes say what went wrong: all know, and torchrun ends them with it."""
    from probprompt import distributed

    try:
        yield
    except UserError:
        if not distributed.from_environment().writes:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # to be stopped now says nothing new
            time.sleep(_GRACE)  # an error of this process alone is shown after that
        raise
    except Interrupted:
        if distributed.from_environment().writes:
            raise
        sys.exit(128 + signal.SIGINT)


def _gather(
    base: dict[str, Any], given: dict[str, Any], assignments: Sequence[str], config: Path | None
) -> dict[str, Any]:
    """Settings from the file, over them the options, over them the assignments."""
    from probprompt.config import apply_assignments, merge, nest, read_toml
    from probprompt.data.stream import parse_tasks

    settings = merge(base, read_toml(config)) if config else base
    settings = merge(settings, nest({name: value for name, value in given.items() if value is not None}))
    settings = apply_assignments(settings, assignments)
    tasks = settings.get("data", {}).get("tasks")
    return merge(settings, {"data": {"tasks": parse_tasks(tasks)}}) if isinstance(tasks, str) else settings


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Tell a user who interrupts a run, or whose run loses a process, how to go on with it."""
    from probprompt import distributed

    try:
        yield
    except distributed.LostError as loss:
        raise UserError(f"{loss}; {_way_on(folder)}") from loss
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {_way_on(folder)}") from None


def _way_on(folder: Path, options: str = "") -> str:
    if not (folder / "run.json").exists():
        return "nothing was written yet"
    return f"go on with: probprompt train --resume {quote(str(folder))}{options}"


def _refuse_changes(folder: Path, given: dict[str, Any], assignments: Sequence[str], config: Path | None) -> None:
    """A run goes on with the settings it began with; others are refused, not ignored."""
    from probprompt.config import flatten, parse_config, with_absolute_paths
    from probprompt.runs.run import Run

    recorded = Run.open(folder).config.model_dump(mode="json")
    wanted = with_absolute_paths(parse_config(_gather(recorded, given, assignments, config))).model_dump(mode="json")
    before, after = flatten(recorded), flatten(wanted)
    names = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    if names:
        changed = "; ".join(f"{name}: {before[name]!r} became {after[name]!r}" for name in names)
        raise UserError(
            f"{folder} was begun with other settings ({changed}): resume it without changes, or start a new run"
        )


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs; several are compared.")],
    out: Annotated[Path | None, Option(help="The page to write.")] = None,
) -> None:
    """Write report.html of a run, or one that compares several."""
    from probprompt.report.pages import write_report
    from probprompt.runs.run import Run

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    for folder in runs:
        Run.open(folder)
    Screen().print(f"report: {write_report(runs, target)}")


def list_(what: Annotated[Listed, Argument(help="What to list.")]) -> None:
    """List methods, benchmarks or backbones."""
    screen = Screen()
    if what is Listed.methods:
        from probprompt import methods

        rows = [(name, method.summary) for name, method in methods.registered().items()]
        screen.listing(("method", "what it is"), rows)
    elif what is Listed.benchmarks:
        from probprompt.cli.cmd_data import list_benchmarks

        list_benchmarks(screen)
    else:
        from probprompt.backbones import pretrained

        listed = [
            (one.name, one.description, f"{(one.size or 0) / 1e6:.1f} MB, {one.place}" if one.available else "no")
            for one in pretrained.known()
        ]
        screen.listing(("backbone", "what it is", "on this machine"), listed)
        screen.print(
            "Any other plain timm ViT by its arch.tag, fetched unless it is in the cache of the hub or of torch.hub; a "
            "local file with --weights FILE (safetensors, npz, pth)."
        )


def cache(
    keep: Annotated[
        float | None,
        Option(metavar="GB", min=0, help="Remove images, those used longest ago first, until so much is left."),
    ] = None,
) -> None:
    """Where decoded images are kept, and how much they take."""
    from probprompt.data.cache import ImageCache

    screen, images = Screen(), ImageCache.usual()
    if images is None:
        screen.print("Decoded images are not kept: the cache is switched off.")
        return
    if keep is not None:
        screen.print(f"removed: {images.clean(round(keep * 1e9)) / 1e9:.2f} GB")
    screen.print(f"{images.folder}: {images.size() / 1e9:.2f} GB of decoded images")
