"""What the commands do."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from probprompt import api, distributed, methods, presets
from probprompt.backbones.pretrained import Listing
from probprompt.cli import Interrupted
from probprompt.cli.console import Screen
from probprompt.config import (
    RunConfig,
    apply_assignments,
    flatten,
    merge,
    parse_config,
    read_toml,
    with_absolute_paths,
)
from probprompt.data.cache import ImageCache
from probprompt.data.stream import parse_tasks
from probprompt.errors import UserError
from probprompt.report import save_overview, write_report
from probprompt.runs.run import Run

_GRACE = 10  # seconds that other processes give the first to say what went wrong


def run_demo(out: Path | None, seed: int, device: str | None) -> None:
    """ProbPrompt and two controls without prompts, one after the other, then a table and a report on all."""
    distributed.refuse_several("the demo")
    screen = Screen()
    folder = out or api.free_folder(Path("runs"), "demo")
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another folder with --out")
    screen.say("20 classes of emoji arrive in 5 tasks; old images are never seen again.")
    screen.say("The test images are drawn in styles that training never shows.\n")
    runs = []
    for method, preset in presets.DEMO:
        screen.title(f"{method}: {methods.find(method).summary}")
        target = folder / method
        with _resumable(target):
            run = api.train("emoji-r", method, preset=preset, out=target, seed=seed, device=device, progress=screen)
        runs.append(run)
    folders = [run.folder for run in runs]
    picture = save_overview(folders, folder / "overview.png")
    page = write_report(folders, folder / "report.html")
    screen.compare(runs)
    screen.say("ProbPrompt's head also reads blocks before the last; RanPAC's, as published, does not.")
    screen.say("What of the gain is the head's, and what the prompts', is in docs/demo.md.\n")
    screen.say(f"picture: {picture}")
    screen.say(f"report: {page}")


def run_cache(keep: float | None) -> None:
    """Say where decoded images are kept and how large they are; remove those used longest ago."""
    screen, cache = Screen(), ImageCache.usual()
    if cache is None:
        screen.say("Decoded images are not kept: the cache is switched off.")
        return
    if keep is not None:
        freed = cache.clean(round(keep * 1e9))
        screen.say(f"removed: {freed / 1e9:.2f} GB")
    screen.say(f"{cache.folder}: {cache.size() / 1e9:.2f} GB of decoded images")


def run_train(
    given: dict[str, Any],
    preset: str | None,
    assignments: list[str],
    config: Path | None,
    out: Path | None,
    resume: Path | None,
    device: str | None,
    track: str | None,
    gpus: int | None = None,
) -> None:
    """A new run, or the rest of one that was stopped."""
    with _one_voice():
        parsed: RunConfig | None = None
        if resume:
            if preset:
                raise UserError("--resume goes on with the run's own settings: leave --preset away")
            _refuse_changes(resume, given, assignments, config, out)
            folder = resume
        else:
            parsed = parse_config(presets.resolve(preset, _gather({}, given, assignments, config)))
            folder = out or api.default_folder(parsed)
        if gpus is not None and distributed.must_launch(gpus, device):
            _launch(gpus, folder, [] if resume or out else ["--out", str(folder)])
            return
        screen = Screen()
        with _resumable(folder):
            if parsed:
                run = api.start(parsed, folder, device, screen, track)
            else:
                run = api.resume(folder, device, screen, track)
        if distributed.from_environment().writes:
            screen.show(run)


def _launch(gpus: int, folder: Path, more: list[str]) -> None:
    """Give this very command to so many processes."""
    try:
        distributed.launch(gpus, "-m", "probprompt", *sys.argv[1:], *more)
    except distributed.LostError as loss:
        raise UserError(f"{loss}; {_way_on(folder, f' --gpus {gpus}')}") from None


@contextmanager
def _one_voice() -> Iterator[None]:
    """Let the first of several processes say what went wrong: all know, and torchrun ends them with it."""
    try:
        yield
    except UserError:
        if not distributed.from_environment().writes:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # to be stopped now says nothing new
            time.sleep(_GRACE)  # should it be the mistake of this process alone, it is told then
        raise
    except Interrupted:
        if distributed.from_environment().writes:
            raise
        sys.exit(128 + signal.SIGINT)


def _gather(base: dict[str, Any], given: dict[str, Any], assignments: list[str], config: Path | None) -> dict[str, Any]:
    """Settings from the file, over them the options, over them the assignments."""
    settings = merge(base, read_toml(config)) if config else base
    options = {name: {k: v for k, v in group.items() if v is not None} for name, group in given.items()}
    settings = merge(settings, {name: group for name, group in options.items() if group})
    settings = apply_assignments(settings, assignments)
    tasks = settings.get("data", {}).get("tasks")
    if isinstance(tasks, str):
        settings = merge(settings, {"data": {"tasks": parse_tasks(tasks)}})
    return settings


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Tell a user who interrupts a run, or whose run loses a process, how to go on with it."""
    try:
        yield
    except distributed.LostError as loss:
        raise UserError(f"{loss}; {_way_on(folder)}") from loss
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {_way_on(folder)}") from None


def _way_on(folder: Path, options: str = "") -> str:
    """How to go on with a run that was stopped."""
    if not (folder / "run.json").exists():
        return "nothing was written yet"
    return f"go on with: probprompt train --resume {quote(str(folder))}{options}"


def _refuse_changes(
    folder: Path, given: dict[str, Any], assignments: list[str], config: Path | None, out: Path | None
) -> None:
    """A run goes on with the settings it began with; others are refused, not ignored."""
    if out:
        raise UserError("--resume goes on in the run's own folder: leave --out away")
    recorded = Run.open(folder).config.model_dump(mode="json")
    wanted = with_absolute_paths(parse_config(_gather(recorded, given, assignments, config))).model_dump(mode="json")
    before, after = flatten(recorded), flatten(wanted)
    changed = [
        f"{name}: {before[name]!r} became {after[name]!r}"
        for name in before.keys() & after.keys()
        if before[name] != after[name]
    ]
    if changed:
        raise UserError(
            f"{folder} was begun with other settings ({'; '.join(sorted(changed))}): resume it without changes, "
            "or start a new run"
        )


def run_list(what: str) -> None:
    """A table of what can be named."""
    screen = Screen()
    if what == "methods":
        from probprompt import methods

        rows = [(name, method.summary) for name, method in methods.registered().items()]
        screen.listing(("method", "what it is"), rows)
    elif what == "benchmarks":
        from probprompt.cli.cmd_data import list_benchmarks

        list_benchmarks(screen)
    else:
        from probprompt.backbones import pretrained

        found = [(item.name, item.description, _whereabouts(item)) for item in pretrained.known()]
        screen.listing(("backbone", "what it is", "on this machine"), found)
        screen.say(
            "Any other plain timm ViT by its arch.tag, fetched unless it is in the cache of the hub or of torch.hub; a "
            "local file with --weights FILE (safetensors, npz, pth)."
        )


def _whereabouts(item: Listing) -> str:
    """Whether weights are on this machine, how large they are and where."""
    return f"{(item.size or 0) / 1e6:.1f} MB, {item.place}" if item.available else "no"


def run_report(runs: list[Path], out: Path | None) -> None:
    """A page on one run or several."""
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    for folder in runs:
        Run.open(folder)
    Screen().say(f"report: {write_report(runs, target)}")
