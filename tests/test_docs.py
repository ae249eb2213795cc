"""Statements of the documents: examples work, commands exist, numbers come from recorded runs."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import draw_overview
from probprompt import api, methods, presets
from probprompt.cli.cmd_compare import read_spec
from probprompt.config import merge, parse_config, read_toml
from probprompt.evaluation import metrics
from probprompt.methods import base
from probprompt.report.compare import pixels_hash
from probprompt.runs.grid import Grid, describe
from probprompt.runs.run import read_results
from reproduction import bench_pages, fidelity, page_tables
from reproduction.results import count_tasks, read_entries
from reproduction.results import preset_overrides as departures

ROOT = Path(__file__).parent.parent
Settings = Callable[..., dict[str, Any]]


def _snippets(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_example_method_of_contributing_learns(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    exec(_snippets("CONTRIBUTING.md")[0], {"__name__": "example"})
    chosen: dict[str, Any] = settings()
    run = api.train(
        chosen["data"]["benchmark"], "shared-prefix", out=tmp_path / "run", config={**chosen, "method": "shared-prefix"}
    )
    assert run.finished


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert re.search(rf"make {command}\b", readme) and f"\n{command}:" in targets
    script = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert script[-1] == "PROBPROMPT_BROWSER=required make test"  # the tests of the page are never skipped there


def test_prompts_of_the_recorded_demo_differ_between_images() -> None:
    runs = read_results(ROOT / "results" / "emoji-r" / "demo.jsonl")
    rows = {method: [run for run in runs if run.record.method == method] for method, _, _ in presets.DEMO}
    assert {len(found) for found in rows.values()} == {5} and len(runs) == 15
    for run in rows["probprompt"]:
        assert run.similarity["mean_similarity"] < 0.9 and run.similarity["mean_rank"] >= 3
        assert run.similarity["components_used"] >= 4 and run.similarity["largest_share"] <= 0.6
        assert run.record.time["total_s"] < 120
    assert all(run.similarity["mean_similarity"] > 0.9 for run in rows["vq-prompt"])


def test_pages_on_prompts_are_made_from_the_recorded_runs() -> None:
    for name, table in fidelity.tables(ROOT / "results").items():
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert fidelity.fill(page, table) == page, "write it with: python -m reproduction fidelity"
    drawn = fidelity.draw_noise(ROOT / "results" / "emoji-r" / "noise.jsonl")
    assert_same_image(ROOT / "docs" / "fidelity.png", drawn)


def test_tables_of_results_pages_come_from_records() -> None:
    pages = page_tables.fill_pages(ROOT / "results")
    assert set(pages) == set((ROOT / "results").glob("*.md"))
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text, "write it with: python -m reproduction results"


def test_every_record_is_linked_from_a_page() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "results").glob("*.md")]
    links = {(page.parent / link).resolve() for page in pages for link in _links(page)}
    unlinked = [path.name for path in (ROOT / "results").rglob("*.jsonl") if path.resolve() not in links]
    assert unlinked == ["demo-weights.log.jsonl"]


@pytest.fixture(scope="module")
def recorded() -> dict[tuple[str, ...], list[float]]:
    """Final average accuracy of the runs in ten tasks with a ViT-Ti, by benchmark, method, preset and what departs."""
    found = dict[tuple[str, ...], list[float]]()
    for entry in read_entries(ROOT / "results"):
        config = entry.content["config"]
        if config["backbone"]["name"].startswith("vit_tiny") and count_tasks(entry.record) == 10:
            changes = describe(tuple(departures(entry.record).items()))
            key = (config["data"]["benchmark"], entry.method, str(config["preset"]), *changes)
            found.setdefault(key, []).append(metrics.final_average_accuracy(entry.matrix))
    return found


README_ROWS = {
    "Joint fine-tuning (upper bound, one seed)": ("joint", "matched"),
    "**ProbPrompt, preset `flagship`**": ("probprompt", "flagship"),
    "VQ-Prompt with the same head": ("vq-prompt", "ridge"),
    "RanPAC": ("ranpac", "matched"),
    "VQ-Prompt": ("vq-prompt", "matched"),
    "ProbPrompt (paper)": ("probprompt", "matched"),
    "Linear probe": ("linear-probe", "matched"),
}


@pytest.mark.parametrize("label", README_ROWS)
def test_readme_table_has_the_recorded_numbers(label: str, recorded: dict[tuple[str, ...], list[float]]) -> None:
    key = README_ROWS[label]
    accuracies = [recorded.get((benchmark, *key), []) for benchmark in ("cifar100", "cub200", "tu-berlin")]
    assert {len(values) for values in accuracies} == ({1, 0} if "one seed" in label else {3})
    stem = "-".join(key)
    runs = sorted((ROOT / "results" / "cifar100" / "vit-ti16-augreg-in21k-ft-in1k").glob(f"{stem}-s?.json"))
    seconds = [json.loads(path.read_text(encoding="utf-8"))["time"]["total_s"] for path in runs]
    cells = [f"{np.mean(values):.1f}" if values else "-" for values in accuracies] + [f"{np.median(seconds):.0f} s"]
    (line,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {label} |")]
    assert [cell.strip() for cell in line.strip("|").split("|")][2:] == cells


def test_readme_findings_hold(recorded: dict[tuple[str, ...], list[float]]) -> None:
    def gap(benchmark: str, *keys: tuple[str, ...]) -> tuple[float, float]:
        mine, other = (recorded[benchmark, *key] for key in keys)
        return float(np.mean(mine) - np.mean(other)), float(max(np.std(mine), np.std(other)))

    flagship = ("probprompt", "flagship")
    for benchmark in ("cifar100", "tu-berlin"):
        difference, std = gap(benchmark, flagship, ("vq-prompt", "ridge"))
        assert abs(difference) <= std, "level under the same head"
        assert gap(benchmark, flagship, ("probprompt", "matched"))[0] > 5, "the head and the first task"
    difference, std = gap("cub200", flagship, ("ranpac", "matched", "flip_average=true"))
    assert abs(difference) <= std, "level on birds"


def test_readme_figure_is_drawn_from_the_records() -> None:
    assert_same_image(ROOT / "docs" / "overview.png", draw_overview.draw_overview())


def assert_same_image(path: Path, content: bytes) -> None:
    one, two = (np.asarray(Image.open(file).convert("RGB"), dtype=float) for file in (path, io.BytesIO(content)))
    assert one.shape == two.shape and np.abs(one - two).mean() < 1.0


def test_the_flagship_is_ahead_of_every_row_but_the_upper_bound() -> None:
    """On all benchmarks and backbones that have it, over three seeds; on CIFAR-100 by a bar.

    Not among these rows: VQ-Prompt adapted in the same way (`ridge`), which is level with it.
    """
    rows = dict[tuple[str, str], dict[tuple[str, str], list[float]]]()
    for entry in read_entries(ROOT / "results"):
        if count_tasks(entry.record) == 10 and not entry.varied:
            here = rows.setdefault((entry.benchmark, entry.backbone[:8]), {})
            here.setdefault((entry.method, entry.preset), []).append(metrics.final_average_accuracy(entry.matrix))
    assert len(rows) == 5
    for here in rows.values():
        own = here.pop(("probprompt", "flagship"))
        others = [values for (method, kind), values in here.items() if method != "joint" and kind != "ridge"]
        assert len(own) == 3 and len(others) >= 4 and all(np.mean(own) > np.mean(values) for values in others)
        if ("joint", "matched") in here:
            assert 83.0 <= np.mean(own) < np.mean(here["joint", "matched"])


@pytest.mark.parametrize("benchmark", ["cub200", "tu-berlin"])
def test_recorded_rows_of_a_benchmark_share_their_images(benchmark: str) -> None:
    entries = [entry for entry in read_entries(ROOT / "results") if entry.benchmark == benchmark]
    (published,) = {pixels_hash(entry.record) for entry in entries if not entry.preset_overrides}
    for entry in entries:
        assert pixels_hash(entry.record) == published or entry.content["stream"]["differences"]


BENCHED = {"docs/performance.md": {"figures", "methods", "growth"}, "docs/tutorials/reproducing.md": {"reproduction"}}


def test_the_recorded_figures_reach_what_was_set_as_their_bar() -> None:
    """On one H200 with data path, in batches of 128; neither fp8 nor kept queries."""
    found = {}
    for name in ("vit-b16-probprompt", "vit-b16-vq-prompt", "vit-ti16-probprompt"):
        record = json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text(encoding="utf-8"))
        (found[name],) = record["results"]
        assert record["hardware"]["gpu"] == "NVIDIA H200" and "switches" not in record["hardware"]
        assert (found[name]["batch"], found[name]["image_size"]) == (128, 224)
    large, rival, small = found.values()
    assert large["training"]["images_per_s"] >= 3700 and large["inference"]["images_per_s"] >= 5700
    assert rival["training"]["images_per_s"] <= 1.04 * large["training"]["images_per_s"]
    assert large["memory"]["training_peak"] <= 5.5 * 2**30
    assert small["training"]["images_per_s"] >= 25_000
    folder = ROOT / "results" / "cifar100" / "vit-ti16-augreg-in21k-ft-in1k"
    run = json.loads((folder / "probprompt-matched-s0.json").read_text(encoding="utf-8"))
    spent = run["time"]
    assert run["hardware"]["gpu"] == "NVIDIA H200" and "switches" not in run["hardware"] and spent["total_s"] <= 90
    inside = sum(spent[f"{name}_s"] for name in ("training", "alignment", "evaluation"))
    assert spent["total_s"] - inside <= 0.05 * spent["total_s"]


@pytest.mark.parametrize("page", BENCHED)
def test_tables_come_from_the_recorded_benches(page: str) -> None:
    """To the letter what `python -m reproduction pages RECORD ... --page PAGE` writes from all records."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- bench (\w+): made by python -m reproduction pages -->", text)) == BENCHED[page]
    folder = ROOT / "results" / "bench"
    if not folder.exists():
        pytest.skip("nothing was recorded yet")
    assert bench_pages.fill_page(text, ROOT / page, list(folder.glob("*.json"))) == text


def _links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))


def test_links_between_documents_lead_somewhere() -> None:
    made = {"reference/command-line.md"}  # written when the site is built
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")):
        for target in _links(page):
            if not target.startswith("http") and target not in made:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_that_pages_name_exist() -> None:
    source = ROOT / "src" / "probprompt"
    for document in ("README.md", "CONTRIBUTING.md", "docs/methods.md", "docs/performance.md"):
        for name in re.findall(r"`([\w/]+\.py)`", (ROOT / document).read_text(encoding="utf-8")):
            homes = (ROOT, source, source / "methods")
            assert any((home / name).is_file() for home in homes), f"{document}: {name}"


def test_the_map_of_the_code_names_modules_that_exist() -> None:
    source, text = ROOT / "src" / "probprompt", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| .+ \|$", text, flags=re.MULTILINE)
    packages = {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    modules = {path.stem for path in source.glob("*.py") if not path.stem.startswith("__")}
    assert set(re.findall(r"`([\w/]+)`", " ".join(first for first, _ in rows))) == packages | modules
    for package, does in rows:
        for name in re.findall(r"`(\w+)`", does) if package.count("`") == 2 else ():
            assert (source / package.strip("`") / f"{name}.py").is_file(), f"{package}: {name}"


def test_every_method_is_described() -> None:
    for document in ("README.md", "docs/methods.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        assert not [name for name in methods.registered() if f"`{name}`" not in text]


def test_the_embedded_weights_reach_what_their_record_says() -> None:
    record = json.loads((ROOT / "src" / "probprompt" / "weights" / "demo.json").read_text())
    assert record["validation"]["top1"] >= 50
    assert (ROOT / "src" / "probprompt" / "weights" / "demo.safetensors").stat().st_size <= 8_000_000


def test_the_example_config_is_the_demos() -> None:
    method, preset, settings = presets.DEMO[0]
    demo = merge(presets.settings(preset, method, "emoji-r"), settings)
    assert method == "probprompt"
    assert parse_config(read_toml(ROOT / "examples" / "demo.toml")) == parse_config(demo)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_other_example_is_a_grid_that_could_be_run(path: Path, tmp_path: Path) -> None:
    if path.name == "demo.toml":
        pytest.skip("a single run, held by the test above")
    grid = Grid(read_spec(path, {}, [], []), tmp_path / "grid")
    assert grid.runs and not (tmp_path / "grid").exists()
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    assert first.startswith("# ") and f"probprompt compare examples/{path.name}" in first


def test_served_load_is_close_to_offline_speed() -> None:
    load = json.loads((ROOT / "results" / "serve-load.json").read_text(encoding="utf-8"))
    assert load["clients"] == 32 and load["errors"] == 0
    assert load["images_per_s"] >= 0.6 * load["offline"]["images_per_s"]
