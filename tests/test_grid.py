"""A grid of runs: its content, what it rejects, and that nothing finished is run twice."""

import hashlib
import importlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from probprompt import api, presets
from probprompt.cli import cmd_compare, grid_screen
from probprompt.cli.cmd_compare import read_spec
from probprompt.cli.grid_screen import GridScreen
from probprompt.config import RunConfig, flatten, merge, parse_config, with_absolute_paths
from probprompt.errors import Interrupted, UserError
from probprompt.heads.closed_form import RidgeSettings
from probprompt.heads.linear import LinearSettings
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs import grid as runs_grid
from probprompt.runs.executors import TimeEstimator, execute, run_grid
from probprompt.runs.grid import SILENT_GRID, ExecutionOptions, Grid, GridCallback, Outcome, RunActions, parse_spec
from probprompt.runs.run import Run, RunRecord, config_hash
from run_cases import GRID as TINY

ROOT = Path(__file__).parent.parent
Spec = Callable[..., runs_grid.GridSpec]


@pytest.fixture
def spec(pictures: Path) -> Spec:
    """Build a small grid; entries given by name go over it."""

    def build(**entries: Any) -> runs_grid.GridSpec:
        base = {"methods": ["probprompt", "linear-probe"], "benchmarks": [str(pictures)], "seeds": [0, 1]}
        return parse_spec({**base, "presets": ["custom"], "settings": TINY, **entries})

    return build


class Worker:
    """Writes what runs would leave, and records which; some fail, some are interrupted."""

    def __init__(self, fail: str = "", interrupt: str = "", seconds: float = 2.0) -> None:
        self.started: list[str] = []
        self.resumed: list[str] = []
        self.fail, self.interrupt, self.seconds = fail, interrupt, seconds

    def start(self, config: RunConfig, out: Path, device: str | None, progress: ProgressCallback) -> Run:
        self.started.append(_name(out))
        if self.fail and self.fail in str(out):
            raise RuntimeError(f"no luck with {config.method.name}")
        run = Run.create(out, RunRecord(config=config.to_stored(), status="running"))
        if self.interrupt and self.interrupt in str(out):
            raise KeyboardInterrupt
        return self._finish(run)

    def resume(self, out: Path, device: str | None, progress: ProgressCallback) -> Run:
        self.resumed.append(_name(out))
        return self._finish(Run.open(out))

    def _finish(self, run: Run) -> Run:
        (run.folder / "accuracy.json").write_text(json.dumps({"matrix": [[80.0, 60.0], [None, 70.0]]}))
        run.update(status="finished", time={"total_s": self.seconds})
        return run

    def run(self, grid: Grid, progress: GridCallback = SILENT_GRID) -> list[Outcome]:
        return run_grid(grid, RunActions(self.start, self.resume, "cpu"), progress)


def _name(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


def names(grid: Grid) -> list[str]:
    return [cell.name for cell in grid.runs]


def test_grid_is_not_resumed_with_other_weights(spec: Spec, tmp_path: Path) -> None:
    weights = tmp_path / "mine.safetensors"
    weights.write_bytes(b"as it was")
    settings = merge(TINY, {"backbone": {"weights": str(weights)}})
    worker = Worker()
    first = worker.run(Grid(spec(settings=settings, seeds=[0]), tmp_path / "grid"))
    before = hashlib.sha256(b"as it was").hexdigest()
    for outcome in first:
        assert outcome.run
        outcome.run.update(backbone={"sha256": before})
    weights.write_bytes(b"another")
    more = Grid(spec(settings=settings, seeds=[0, 1]), tmp_path / "grid")
    with pytest.raises(UserError, match=rf"mine.safetensors .*{before}"):
        worker.run(more)
    weights.write_bytes(b"as it was")
    assert all(outcome.run for outcome in worker.run(more))


def test_grid_holds_all_combinations_by_seed(spec: Spec, tmp_path: Path) -> None:
    grid = Grid(spec(vary={"components": [4, 8], "training.epochs": [1, 2]}), tmp_path)
    rows = [f"probprompt,components={n},epochs={e}" for n in (4, 8) for e in (1, 2)]
    rows += [f"linear-probe,epochs={e}" for e in (1, 2)]  # it has no components: they are not varied
    assert names(grid) == [f"pictures/custom/{row}/seed-{seed}" for seed in (0, 1) for row in rows]
    assert all(cell.folder == tmp_path / cell.name for cell in grid.runs)
    third = grid.runs[2]
    assert third.varied == (("method.components", 8), ("training.epochs", 1))
    assert third.config.method.model_dump()["components"] == 8 and third.config.training.epochs == 1


def test_settings_override_presets_and_variations_both(spec: Spec, pictures: Path, tmp_path: Path) -> None:
    chosen = {"training": {"batch_size": 16, "epochs": 5}, "method.samples": 2, "flip": False}
    asked = spec(presets=["matched"], seeds=[3], settings=chosen, vary={"training.epochs": [7]})
    for cell in Grid(asked, tmp_path).runs:
        own: dict[str, Any] = {"training": {"batch_size": 16, "epochs": 7, "flip": False}}
        own |= {"method": {"samples": 2}} if cell.method == "probprompt" else {}
        wanted = merge(presets.settings("matched", cell.method, str(pictures)), own)
        wanted = merge(wanted, {"seeds": {"order": 3, "init": 3, "data": 3}})
        assert cell.config == with_absolute_paths(parse_config(wanted))
        assert cell.preset == cell.config.preset == "matched"


def test_settings_of_a_head_reach_the_cells_with_such_a_head(spec: Spec, tmp_path: Path) -> None:
    kinds, settings = {"head.kind": ["linear", "ridge"]}, {**TINY, "head.projections": 500}
    asked = spec(presets=["matched"], methods=["probprompt"], seeds=[0], settings=settings, vary=kinds)
    heads = [cell.config.head for cell in Grid(asked, tmp_path).runs]
    assert heads == [LinearSettings(), RidgeSettings(projections=500)]
    other = spec(methods=["lda", "ranpac"], seeds=[0], vary={"head.shrinkage": [0.1, 0.2]})
    assert [cell.config.head.model_dump().get("shrinkage") for cell in Grid(other, tmp_path).runs[:2]] == [0.1, 0.2]
    with pytest.raises(UserError, match=r"head.shrinkage.* linear"):
        Grid(spec(settings={**TINY, "head.shrinkage": 0.1}), tmp_path)


def test_methods_without_the_preset_are_left_out(spec: Spec, tmp_path: Path) -> None:
    grid = Grid(spec(presets=["flagship", "custom"], seeds=[0]), tmp_path)
    row = "pictures/{}/{}/seed-0".format
    assert names(grid) == [row("flagship", "probprompt"), row("custom", "probprompt"), row("custom", "linear-probe")]
    assert grid.left_out.startswith(
        "flagship on pictures for linear-probe (The preset 'flagship' supports only probprompt"
    )
    with pytest.raises(UserError, match="no runs: flagship on pictures"):
        Grid(spec(presets=["flagship"], methods=["linear-probe"]), tmp_path)


def test_names_of_folders_are_readable_safe_and_unique(spec: Spec, tmp_path: Path) -> None:
    values: list[Any] = ["a/b", "a b", "../up", "x" * 200]
    grid = Grid(spec(vary={"backbone.weights": values}, seeds=[0], methods=["linear-probe"]), tmp_path)
    parts = [name.split("/") for name in names(grid)]
    assert {len(part) for part in parts} == {4} and len({part[2] for part in parts}) == 4
    assert all(len(part[2]) < 100 and ".." not in part for part in parts)
    assert parts[0][2].startswith("linear-probe,weights=a-b~")
    assert [runs_grid.brief(value) for value in ([0, 1], None, True)] == ["[0,1]", "none", "true"]
    varied = (("data.tasks", 2), ("training.x", 1), ("alignment.x", 3))
    assert runs_grid.describe(varied) == ["tasks=2", "training.x=1", "alignment.x=3"]


@pytest.mark.parametrize(
    ("entries", "messages"),
    [
        (
            {"methods": ["probpromt"], "benchmarks": ["emojir"], "presets": ["mached"]},
            ["mean 'probprompt'", "'emoji-r'?", "'matched'?"],
        ),
        ({"settings": {"training": {"epoch": 1}, "smaples": 2}}, ["'training.epochs'", "'smaples'"]),
        ({"vary": {"rates": [1]}, "settings": {}}, ["Unknown setting 'rates'"]),
        (
            {"vary": {"enabled": [True]}, "methods": "linear-probe", "settings": {"epochs": 2}},
            ["'epochs' is ambiguous"],
        ),
        ({"settings": {"seeds": {"order": 1}}}, ["seeds.order cannot be a setting of a grid. Use its seeds"]),
        ({"vary": {"method.name": ["l2p"]}}, ["method.name cannot be a setting of a grid. Use its methods"]),
        ({"settings": {"preset": "x"}}, ["preset cannot be a setting of a grid. Use its presets"]),
        (
            {"vary": {"training.epochs": [1, 0]}},
            [f"pictures/custom/{name},epochs=0: training.epochs: " for name in ("probprompt", "linear-probe")],
        ),
        ({"vary": {"training.epochs": [2, 2]}}, ["folder pictures/custom/probprompt,epochs=2/seed-0. List each"]),
        ({"method": []}, ["'methods'?"]),
        ({"methods": []}, ["The grid has no methods"]),
        ({"seeds": [-1]}, ["seeds.0: "]),
        ({"vary": {"training": {"epochs": 3}}}, ["vary.training.epochs: "]),
    ],
)
def test_all_errors_are_reported_before_anything_runs(
    spec: Spec, tmp_path: Path, entries: dict[str, Any], messages: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        Grid(spec(**entries), tmp_path / "out")
    assert all(message in str(error.value) for message in messages), str(error.value)
    assert str(error.value).count("\n") == len(messages) - 1
    assert not (tmp_path / "out").exists()


def test_wrong_device_and_equal_names_are_rejected(spec: Spec, pictures: Path, tmp_path: Path) -> None:
    worker = Worker()
    with pytest.raises(UserError, match="'gpu'"):
        run_grid(Grid(spec(), tmp_path), RunActions(worker.start, worker.resume, "gpu"))
    assert worker.started == []
    (tmp_path / "pictures" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match=r"Rename .*pictures"):
        Grid(spec(benchmarks=[str(pictures), str(tmp_path / "pictures")]), tmp_path / "out")


def test_finished_runs_are_not_repeated(spec: Spec, tmp_path: Path) -> None:
    first, second = Worker(), Worker()
    outcomes = first.run(Grid(spec(seeds=[0]), tmp_path))
    assert first.started == ["probprompt/seed-0", "linear-probe/seed-0"] and all(o.run for o in outcomes)
    outcomes = second.run(Grid(spec(seeds=[0, 1]), tmp_path))
    assert second.started == ["probprompt/seed-1", "linear-probe/seed-1"] and second.resumed == []
    assert len(outcomes) == 4 and all(outcome.run for outcome in outcomes)


def test_folder_with_other_settings_is_rejected(spec: Spec, tmp_path: Path) -> None:
    worker = Worker(interrupt="probprompt/seed-1")
    worker.run(Grid(spec(seeds=[0]), tmp_path))
    with pytest.raises(KeyboardInterrupt):
        worker.run(Grid(spec(seeds=[1], methods=["probprompt"]), tmp_path))
    before = list(worker.started)
    changed = merge(TINY, {"training": {"epochs": 3}})
    with pytest.raises(UserError, match=r"\(2 runs\).*seed-0 \(training\.epochs is 1, requested 3\).* --out"):
        worker.run(Grid(spec(seeds=[0, 2], settings=changed), tmp_path))
    with pytest.raises(UserError, match=r"\(1 runs\).*seed-1 \(training\.epochs is 1, requested 3\)"):  # not finished
        Grid(spec(seeds=[1], settings=changed), tmp_path).outcomes()
    assert worker.started == before and worker.resumed == []


def test_failed_run_is_recorded_and_tried_again(spec: Spec, tmp_path: Path) -> None:
    grid, worker = Grid(spec(), tmp_path), Worker(fail="probprompt/seed-0")
    outcomes = worker.run(grid)
    assert worker.started == [_name(cell.folder) for cell in grid.runs]
    assert [bool(outcome.run) for outcome in outcomes] == [False, True, True, True]
    assert outcomes[0].reason == "RuntimeError: no luck with probprompt"
    failed = json.loads((grid.runs[0].folder / "failed.json").read_text())
    assert failed["type"] == "RuntimeError" and failed["message"] == "no luck with probprompt"
    assert failed["traceback"].startswith("Traceback") and "in start" in failed["traceback"]
    again = Worker()
    outcomes = again.run(grid)
    assert again.started == ["probprompt/seed-0"] and all(outcome.run for outcome in outcomes)
    assert not (grid.runs[0].folder / "failed.json").exists()


def test_interrupted_grid_is_resumed(spec: Spec, tmp_path: Path) -> None:
    grid, worker = Grid(spec(), tmp_path), Worker(interrupt="linear-probe/seed-0")
    with pytest.raises(KeyboardInterrupt):
        worker.run(grid)
    assert worker.started == ["probprompt/seed-0", "linear-probe/seed-0"]
    assert [bool(outcome.run) for outcome in grid.outcomes()] == [True, False, False, False]
    assert not any(outcome.problem for outcome in grid.outcomes())
    later = Worker()
    assert all(outcome.run for outcome in later.run(grid))
    assert later.resumed == ["linear-probe/seed-0"]
    assert later.started == ["probprompt/seed-1", "linear-probe/seed-1"]


def test_time_left_is_that_of_similar_runs(spec: Spec, tmp_path: Path) -> None:
    grid = Grid(spec(vary={"components": [4, 8]}), tmp_path)
    assert TimeEstimator(grid.outcomes()).estimate(grid.runs) is None
    four, eight, probe, *later = grid.runs
    Worker(seconds=10.0).start(four.config, four.folder, None, SILENT)
    Worker(seconds=1.0).start(probe.config, probe.folder, None, SILENT)
    pace = TimeEstimator(grid.outcomes())
    assert pace.estimate([later[0]]) == 10.0  # the same row with another seed
    assert pace.estimate([eight]) == 10.0  # the same method
    assert pace.estimate([later[2]]) == 1.0
    Worker(seconds=20.0).start(eight.config, eight.folder, None, SILENT)
    assert TimeEstimator(grid.outcomes()).estimate(later) == 10.0 + 20.0 + 1.0
    other = Grid(spec(methods=["vq-prompt"], seeds=[0]), tmp_path)
    assert TimeEstimator(grid.outcomes()).estimate(other.runs) == pytest.approx(31.0 / 3)  # nothing is alike: the mean


class Diary(GridCallback):
    """Records what a grid reports."""

    def __init__(self) -> None:
        self.lines: list[object] = []

    def begin(self, cell: runs_grid.RunSpec, expected: float | None, rest: float | None) -> None:
        self.lines.append(("begin", _name(cell.folder), expected, rest))

    def end(self, outcome: Outcome, rest: float | None) -> None:
        self.lines.append(("end", bool(outcome.run), rest))


def test_watcher_gets_each_run_and_the_time_left(spec: Spec, tmp_path: Path) -> None:
    diary, worker = Diary(), Worker(fail="linear-probe/seed-0")
    worker.run(Grid(spec(), tmp_path), diary)
    assert diary.lines[:4] == [
        ("begin", "probprompt/seed-0", None, None),
        ("end", True, 6.0),
        ("begin", "linear-probe/seed-0", 2.0, 4.0),
        ("end", False, 4.0),
    ]
    assert diary.lines[-1] == ("end", True, 0)


class TwoAtATime:
    """Ends the older of two runs."""

    ahead = slots = 2

    def __init__(self, worker: Worker) -> None:
        self._worker, self.running = worker, list[runs_grid.RunSpec]()
        self.most = 0

    def submit(self, cell: runs_grid.RunSpec) -> None:
        self.running.append(cell)
        self.most = max(self.most, len(self.running))

    def receive(self) -> Outcome:
        return RunActions(self._worker.start, self._worker.resume).execute(self.running.pop(0), SILENT_GRID)


def test_time_left_of_concurrent_runs(spec: Spec, tmp_path: Path) -> None:
    grid, diary, two = Grid(spec(seeds=[0, 1, 2]), tmp_path), Diary(), TwoAtATime(Worker(fail="linear-probe/seed-1"))
    execute(grid.runs, two, diary, TimeEstimator())
    assert two.most == 2 and not two.running
    assert diary.lines == [("end", number != 3, rest) for number, rest in enumerate((5.0, 4.0, 3.0, 2.0, 2.0, 0.0))]
    assert [bool(outcome.run) for outcome in grid.outcomes()] == [True, True, True, False, True, True]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpus_per_run": 0.5}, "--ray local"),
        ({"cpus_per_run": 2}, "--ray local"),
        ({"ray": "ray", "workers": 2}, "Remove --workers"),
    ],
)
def test_contradictory_places_are_rejected(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ExecutionOptions(**asked)


def options(**given: Any) -> dict[str, Any]:
    return {"methods": None, "benchmarks": None, "seeds": None, "presets": None, **given}


def test_options_override_the_file(tmp_path: Path, pictures: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        'methods = ["probprompt", "l2p"]\nbenchmarks = "emoji-r"\nseeds = 4\n'
        "[settings.training]\nepochs = 3\nbatch_size = 8\n[vary]\nmethod.components = [5, 10]\n"
    )
    read = read_spec(file, options(), [], [])
    found = (read.methods, read.benchmarks, read.seeds, read.presets, read.vary)
    vary = {"method.components": (5, 10)}
    assert found == (("probprompt", "l2p"), ("emoji-r",), (4,), ("matched",), vary)
    given = options(methods=["apt,ft++", "ft++"], seeds=["0-2,7"], benchmarks=[str(pictures)])
    assignments = ["training.epochs=1", "weights=none"]
    read = read_spec(file, given, assignments, ["samples=1,3", "blocks=[0],[0,2]", "backbone.name=demo,x"])
    assert (read.methods, read.seeds, read.benchmarks) == (("apt", "ft++"), (0, 1, 2, 7), (str(pictures),))
    assert flatten(read.settings) == {"training.epochs": 1, "training.batch_size": 8, "weights": None}
    assert read.vary == vary | {"samples": (1, 3), "blocks": ([0], [0, 2]), "backbone.name": ("demo", "x")}
    assert "probprompt" in read_spec(None, options(methods=["all"], benchmarks=["emoji-r"]), [], []).methods


@pytest.mark.parametrize(
    ("given", "assignments", "vary", "message"),
    [
        ({"seeds": ["a"]}, [], [], "got 'a'"),
        ({"seeds": ["4-1"]}, [], [], "got '4-1'"),
        ({}, ["epochs"], [], "KEY=VALUE, got 'epochs'"),
        ({}, [], ["epochs="], "KEY=VALUE, got 'epochs='"),
        ({}, [], [], "The grid has no methods.*\nThe grid has no benchmarks"),
    ],
)
def test_errors_in_options(given: Any, assignments: Any, vary: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_spec(None, options(**given), assignments, vary)


def test_example_is_a_grid(tmp_path: Path) -> None:
    read = read_spec(ROOT / "examples" / "compare.toml", options(), [], [])
    assert len(Grid(read, tmp_path).runs) == 3 * (len(read.methods) + 1)
    assert set(read.labels) <= {*read.methods, *read.benchmarks}


def compare(out: Path, pictures: Path, *, tables_only: bool = False, **given: Any) -> None:
    """Run the command on a grid of which one run diverges."""
    assignments = [f"{name}={json.dumps(value)}" for name, value in flatten(TINY).items()]
    chosen = options(methods=["probprompt,linear-probe"], benchmarks=[str(pictures)], seeds=["0"], presets=["custom"])
    settings = {"assignments": assignments, "vary": ["head_lr=0.01,1e30"], "tables_only": tables_only}
    cmd_compare.compare(**{**chosen, **settings, **given}, out=out, device="cpu")


def test_grid_is_run_once_and_failures_are_reported(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    original = api.start

    def counted(config: RunConfig, out: Path, *rest: Any) -> Run:
        began.append(_name(out))
        return original(config, out, *rest)

    monkeypatch.setattr(api, "start", counted)
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        compare(tmp_path, pictures, methods=["probprompt"])
    printed = capsys.readouterr().out
    assert end.value.code == 1 and len(began) == 2
    good, bad = (tmp_path / "pictures" / "custom" / f"probprompt,head_rate={rate}" / "seed-0" for rate in (0.01, 1e30))
    run = Run.open(good)
    assert run.finished and run.report.exists() and (bad / "failed.json").exists()
    assert re.search(rf"\[1/2\] .*: FAA {run.metrics['FAA']:.2f}%, .* s; about .* s left", printed)
    assert "[2/2]" in printed and f"{bad}: Training diverged" in printed and "Failed: 1 of 2 runs" in printed
    assert all((tmp_path / name).exists() for name in ("table.md", "table.tex", "table.csv", "comparison.html"))
    before = config_hash(run.config)
    with pytest.raises(SystemExit):
        compare(tmp_path, pictures, methods=["probprompt"])
    assert began[2:] == [] and config_hash(Run.open(good).config) == before  # the failed run was begun: resumed
    compare(tmp_path, pictures, methods=["linear-probe"], tables_only=True)
    assert "Not run yet: 2 of 2 runs" in capsys.readouterr().out and len(began) == 2


def test_interrupted_command(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "start", Worker(interrupt="linear-probe,").start)
    with pytest.raises(Interrupted, match=r"2 of 4 runs are finished. Run the same command"):
        compare(tmp_path, pictures)
    with pytest.raises(UserError, match="--runs tabulates existing runs"):
        cmd_compare.compare(methods=["apt"], runs=[tmp_path])


@pytest.fixture
def screen() -> Iterator[tuple[GridScreen, io.StringIO]]:
    shown, made = io.StringIO(), GridScreen()
    made.console = Console(file=shown, width=110, force_terminal=True, highlight=False, legacy_windows=False)
    yield made, shown


def test_terminal_shows_grid_and_stage(screen: tuple[GridScreen, io.StringIO], spec: Spec, tmp_path: Path) -> None:
    progress, shown = screen

    class Staged(Worker):
        def start(self, config: RunConfig, out: Path, device: str | None, progress: ProgressCallback) -> Run:
            assert progress
            with progress.stage("task 1 of 2", 4):
                progress.advance(3)
                progress.describe("loss 1.25")
                assert isinstance(progress, GridScreen) and progress._bars_of_grid
                progress._bars_of_grid.refresh()
            return super().start(config, out, device, progress)

    Staged(seconds=90.0).run(Grid(spec(), tmp_path), progress)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    assert re.search(r"runs +[━╺╸]+ 1/4 about 4 min \d+ s left +pictures/custom/linear-probe/seed-0", plain)
    assert re.search(r"task 1 of 2 +[━╺╸]+ 3/4 .* loss 1\.25", plain)
    assert "[1/4] pictures/custom/probprompt/seed-0: FAA 65.00%, 1 min 30 s; about 4 min 30 s left" in plain
    final = plain.splitlines()[-1].rpartition("\r")[2]
    assert "4/4" in final and "left" not in final and "[4/4]" in plain and "0.0 s" not in plain


def test_time_left_counts_down(
    screen: tuple[GridScreen, io.StringIO], spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, shown = screen
    with progress.grid(3, 0):
        progress.end(Outcome(Grid(spec(), tmp_path).runs[0], problem={"type": "UserError", "message": "no"}), 3600.0)
        later = time.monotonic() + 1800.0
        monkeypatch.setattr(grid_screen, "time", SimpleNamespace(monotonic=lambda: later))
    assert re.search(r"1/3 about (29|30) min.* left", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue()))


WORKERS = """
import os, signal, time
from pathlib import Path

from probprompt import api


def start(config, out, device, progress):
    if "lda" in str(out):  # dies without a word
        os.kill(os.getpid(), signal.SIGKILL)
    Path(os.environ["PROBPROMPT_DIARY"], f"{os.getpid()}").write_text(f"{time.time()} {out}")
    return api.start(config, out, device, progress)


def resume(out, device, progress):
    return api.resume(out, device, progress)
"""


def test_concurrent_runs_and_one_is_killed(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, diary = tmp_path / "modules", tmp_path / "diary"
    modules.mkdir()
    diary.mkdir()
    (modules / "grid_workers.py").write_text(WORKERS)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("PROBPROMPT_DIARY", str(diary))
    module = importlib.import_module("grid_workers")
    settings = {"backbone": TINY["backbone"], "data": {"tasks": 2}}
    asked = {"methods": ["nearest-mean", "lda"], "benchmarks": [str(pictures)], "seeds": [0], "settings": settings}
    grid = Grid(parse_spec(asked), tmp_path / "grid")
    two = ExecutionOptions(workers=2)
    kept, killed = run_grid(grid, RunActions(module.start, module.resume, "cpu"), SILENT_GRID, two)
    assert kept.run and "exit code -9" in killed.reason
    (process,) = diary.iterdir()
    assert process.name != str(os.getpid())  # each run has its process
    alone = api.start(grid.runs[0].config, tmp_path / "alone", "cpu")
    assert (alone.folder / "accuracy.json").read_text() == (grid.runs[0].folder / "accuracy.json").read_text()
    before = kept.run.folder.joinpath("run.json").read_bytes()
    again = run_grid(grid, RunActions(api.start, api.resume, "cpu"), SILENT_GRID, two)
    assert all(outcome.run for outcome in again)
    assert kept.run.folder.joinpath("run.json").read_bytes() == before  # what is finished is not run again
