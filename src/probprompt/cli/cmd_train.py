"""Commands ``train``, ``demo``, ``report`` and ``list``."""

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import probprompt.cli.console as shared
from probprompt.cli.console import DEVICE, METHOD, MODEL, PRESET, PRESETS, RUN, TRAINING, Screen, argument, option
from probprompt.errors import Interrupted, UserError, suggest

_GRACE = 10  # seconds that other processes give the first to report an error


class Listed(StrEnum):
    """Kinds of names to list."""

    methods = "methods"
    presets = "presets"
    benchmarks = "benchmarks"
    backbones = "backbones"


KINDS = shared.completion(lambda: Listed)


def demo(
    out: Annotated[Path | None, option("Output folder.", "FOLDER", default="runs/demo")] = None,
    seed: Annotated[int, option("Seed of class order, initial parameters and batches.", "N", min=0)] = 0,
    device: shared.Device = None,
) -> None:
    """Compare three methods on embedded images (2 minutes).

    Needs no download and no GPU. The last lines name the report to open.
    """
    import probprompt.api as api
    from probprompt import distributed, methods, presets
    from probprompt.report.pages import save_overview, write_report

    distributed.check_single_process("the demo")
    screen = Screen()
    folder = out or api.free_folder(Path("runs"), "demo")
    if folder.exists():
        raise UserError(f"{folder} already exists. Choose another folder with --out.")
    screen.print("20 classes of emoji arrive in 5 tasks. Images of earlier tasks are not used again.")
    screen.print("The test images are drawn in styles that training never uses.\n")
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
    overview = save_overview(folders, folder / "overview.png")
    page = write_report(folders, folder / "report.html")
    screen.compare(runs)
    screen.print("All three heads read the same blocks of the backbone. RanPAC has no prompts.")
    screen.print("docs/demo.md explains what this shows and what it does not.\n")
    screen.print(f"Wrote {overview}.")
    screen.print(f"Wrote {page}. Open it in a browser.")


def train(
    benchmark: Annotated[
        str | None, argument("Benchmark or folder of class folders.", "[DATA]", default="emoji-r")
    ] = None,
    tasks: shared.Tasks = None,
    test: shared.TestFolder = None,
    validate: shared.Validate = False,
    skip_unreadable: shared.SkipUnreadable = False,
    method: Annotated[str | None, option(**METHOD, panel=MODEL)] = None,
    preset: Annotated[str | None, option(**PRESET, panel=MODEL)] = None,
    backbone: shared.Backbone = None,
    weights: shared.Weights = None,
    epochs: Annotated[int | None, option("Number of epochs per task.", "N", min=1, panel=TRAINING)] = None,
    batch_size: Annotated[int | None, option("Images per training step.", "N", min=1, panel=TRAINING)] = None,
    seed: Annotated[
        int | None, option("Seed of class order, initial parameters and batches.", "N", min=0, panel=TRAINING)
    ] = None,
    assignments: shared.Assignments = None,
    config: Annotated[
        Path | None, option("TOML file of settings; options override it.", "FILE", panel=TRAINING)
    ] = None,
    out: Annotated[Path | None, option("Output folder.", "FOLDER", default="new folder under runs/", panel=RUN)] = None,
    resume: Annotated[Path | None, option("Continue an interrupted run.", "RUN", panel=RUN)] = None,
    device: Annotated[str | None, option(**DEVICE, panel=RUN)] = None,
    gpus: Annotated[
        int | None, option("Number of GPUs to train on (one process per GPU).", "N", min=1, panel=RUN)
    ] = None,
    track: Annotated[str | None, option("Log to tensorboard, trackio or wandb.", "NAME", panel=RUN)] = None,
) -> None:
    """Train one method on a benchmark or a folder of images.

    Example: probprompt train photos/ --method ranpac --tasks 5
    """
    import probprompt.api as api
    from probprompt import distributed, presets
    from probprompt.config import parse_config

    given = shared.named_settings(tasks, test, backbone, weights, validate, skip_unreadable)
    given |= {"data.benchmark": benchmark, "method.name": method}
    given |= {"training.epochs": epochs, "training.batch_size": batch_size}
    given |= dict.fromkeys(("seeds.order", "seeds.init", "seeds.data"), seed)
    parsed = None
    with _report_from_main_process():
        if resume:
            for option, value, kept in (("--preset", preset, "settings"), ("--out", out, "folder")):
                if value:
                    raise UserError(
                        f"--resume cannot be combined with {option}. A resumed run keeps its {kept}; remove {option}."
                    )
            _check_unchanged(resume, given, assignments or [], config)
            folder = resume
        else:
            parsed = parse_config(presets.resolve(preset, _gather({}, given, assignments or [], config)))
            folder = out or api.default_folder(parsed)
        if gpus is not None and distributed.must_launch(gpus, device):
            more = [] if resume or out else ["--out", str(folder)]
            try:
                distributed.launch(gpus, "-m", "probprompt", *sys.argv[1:], *more)
            except distributed.ProcessLostError as loss:
                raise UserError(f"{str(loss).rstrip('.')}. {_how_to_continue(folder, f' --gpus {gpus}')}") from None
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
def _report_from_main_process() -> Iterator[None]:
    """Let only the first of several processes report an error; torchrun then stops the others."""
    from probprompt import distributed

    try:
        yield
    except UserError:
        if not distributed.from_environment().writes:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # being stopped is no news to the user
            time.sleep(_GRACE)  # an error of only this process is shown after that
        raise
    except Interrupted:
        if distributed.from_environment().writes:
            raise
        sys.exit(128 + signal.SIGINT)


def _gather(
    base: dict[str, Any], given: dict[str, Any], assignments: Sequence[str], config: Path | None
) -> dict[str, Any]:
    """Merge the settings of the file, the options and the assignments; later ones win."""
    from probprompt.config import apply_assignments, merge, nest, read_toml
    from probprompt.data.stream import parse_tasks

    settings = merge(base, read_toml(config)) if config else base
    settings = merge(settings, nest({name: value for name, value in given.items() if value is not None}))
    settings = apply_assignments(settings, assignments)
    tasks = settings.get("data", {}).get("tasks")
    return merge(settings, {"data": {"tasks": parse_tasks(tasks)}}) if isinstance(tasks, str) else settings


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """If a run is interrupted or loses a process, report how to continue it."""
    from probprompt import distributed

    try:
        yield
    except distributed.ProcessLostError as loss:
        raise UserError(f"{str(loss).rstrip('.')}. {_how_to_continue(folder)}") from loss
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted. {_how_to_continue(folder)}") from None


def _how_to_continue(folder: Path, options: str = "") -> str:
    if not (folder / "run.json").exists():
        return "Nothing was written yet."
    return f"Continue with: probprompt train --resume {quote(str(folder))}{options}"


def _check_unchanged(folder: Path, given: dict[str, Any], assignments: Sequence[str], config: Path | None) -> None:
    """Reject settings that differ from those of a run to resume."""
    from probprompt.config import flatten, parse_config, with_absolute_paths
    from probprompt.runs.run import Run

    recorded = Run.open(folder).config.model_dump(mode="json")
    settings = with_absolute_paths(parse_config(_gather(recorded, given, assignments, config))).model_dump(mode="json")
    before, after = flatten(recorded), flatten(settings)
    names = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    if names:
        changed = "; ".join(f"{name}: {before[name]!r} became {after[name]!r}" for name in names)
        raise UserError(
            f"{folder} was started with other settings ({changed}). Resume it without changes, or start a new run."
        )


def report(
    runs: Annotated[list[Path], argument("Run folders; several are compared.", "RUN...")],
    out: Annotated[Path | None, option("HTML file to write.", "FILE", default="report.html")] = None,
) -> None:
    """Write an HTML report for one or more runs.

    The report of one run is written into its folder.

    Example: probprompt report runs/demo/*/
    """
    from probprompt.report.pages import write_report
    from probprompt.runs.run import Run

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    for folder in runs:
        Run.open(folder)
    Screen().print(f"Wrote {write_report(runs, target)}.")


def list_(
    kind: Annotated[
        str | None, argument("methods, presets, benchmarks or backbones.", "[KIND]", autocompletion=KINDS)
    ] = None,
) -> None:
    """List methods, presets, benchmarks or backbones.

    Without KIND, the kinds are listed with counts.
    """
    screen = Screen()
    if kind is not None and kind not in tuple(Listed):
        raise UserError(f"Unknown kind {kind!r}. {suggest(kind, Listed)}")
    if kind == Listed.benchmarks:
        from probprompt.cli.cmd_data import list_benchmarks

        list_benchmarks(screen)
    elif kind == Listed.backbones:
        from probprompt.backbones import pretrained

        listed = [
            (one.name, one.description, f"{(one.size or 0) / 1e6:.1f} MB, {one.place}" if one.available else "no")
            for one in pretrained.known()
        ]
        screen.listing(("backbone", "description", "local"), listed)
        screen.print(
            "Other plain timm ViTs work by name (architecture.tag) and are downloaded once. Use a local file with "
            "--weights FILE (safetensors, npz, pth)."
        )
    elif kind == Listed.presets:
        screen.listing(("preset", "description"), list(PRESETS.items()))
    else:
        from probprompt import methods

        if kind == Listed.methods:
            rows = [(name, method.summary) for name, method in methods.registered().items()]
            screen.listing(("method", "description"), rows)
            return
        from probprompt.backbones import pretrained
        from probprompt.data import datasets

        counts = map(len, (methods.registered(), PRESETS, datasets.registered(), pretrained.known()))
        screen.figures(("kind", "count"), [(str(one), str(count)) for one, count in zip(Listed, counts, strict=True)])
        screen.print("List one kind, such as 'probprompt list methods'.")
