"""What the commands do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from probprompt import api, methods, presets
from probprompt.cli import Interrupted
from probprompt.cli.screen import Screen
from probprompt.config import apply_assignments, flatten, merge, parse_config, read_toml, with_absolute_paths
from probprompt.data.stream import parse_tasks
from probprompt.errors import UserError
from probprompt.report import save_overview, write_report
from probprompt.runs.record import Run


def run_demo(out: Path | None, seed: int, device: str | None) -> None:
    """ProbPrompt and two controls without prompts, one after the other, then a table and a report on all."""
    screen = Screen()
    folder = out or api.free_folder(Path("runs"), "demo")
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another folder with --out")
    screen.say("20 classes of emoji arrive in 5 tasks; old images are never seen again.")
    screen.say("The test images are drawn in styles that training never shows.\n")
    runs = []
    for method, preset in presets.DEMO:
        screen.title(f"{method}: {methods.find(method).summary}")
        config = presets.settings(preset, method, "emoji-r")
        target = folder / method
        with _resumable(target):
            run = api.train(out=target, seed=seed, config=config, device=device, watcher=screen)
        runs.append(run)
    folders = [run.folder for run in runs]
    picture = save_overview(folders, folder / "overview.png")
    page = write_report(folders, folder / "report.html")
    screen.compare(runs)
    screen.say(f"picture: {picture}")
    screen.say(f"report: {page}")


def run_train(
    given: dict[str, Any],
    preset: str | None,
    assignments: list[str],
    config: Path | None,
    out: Path | None,
    resume: Path | None,
    device: str | None,
    track: str | None,
) -> None:
    """A new run, or the rest of one that was stopped."""
    screen = Screen()
    if resume:
        if preset:
            raise UserError("--resume goes on with the run's own settings: leave --preset away")
        _refuse_changes(resume, given, assignments, config, out)
        with _resumable(resume):
            run = api.resume(resume, device, screen, track)
    else:
        settings = api.with_preset(preset, _gather({}, given, assignments, config))
        run = _new_run(settings, out, device, track, screen)
    screen.show(run)


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


def _new_run(settings: dict[str, Any], out: Path | None, device: str | None, track: str | None, screen: Screen) -> Run:
    parsed = parse_config(settings)
    folder = out or api.default_folder(parsed)
    with _resumable(folder):
        return api.start(parsed, folder, device, screen, track)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Tell a user who interrupts a run how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        begun = (folder / "run.json").exists()
        hint = f"go on with: probprompt train --resume {quote(str(folder))}" if begun else "nothing was written yet"
        raise Interrupted(f"interrupted; {hint}") from None


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
        from probprompt.data import benchmarks

        known = benchmarks.registered().items()
        rows = [(name, f"{source.summary}; {source.tasks} tasks") for name, source in known]
        screen.listing(("benchmark", "what it is"), [*rows, ("FOLDER", benchmarks.Folder.summary)])
    else:
        from probprompt import checkpoints

        found = [(item.name, item.description, "yes" if item.available else "no") for item in checkpoints.known()]
        screen.listing(("backbone", "what it is", "on this machine"), found)
        screen.say("Any other plain timm ViT by its arch.tag; a local file with --weights FILE.safetensors.")


def run_report(runs: list[Path], out: Path | None) -> None:
    """A page on one run or several."""
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    for folder in runs:
        Run.open(folder)
    Screen().say(f"report: {write_report(runs, target)}")
