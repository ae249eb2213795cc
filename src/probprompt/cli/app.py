"""The commands. What is heavy is imported inside them, so that help and mistakes come at once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from probprompt import __version__

app = typer.Typer(
    name="probprompt",
    help="Teach a frozen vision transformer new classes, one task after another, without keeping old images.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_VALIDATION = 0.2


class Listed(StrEnum):
    """What can be listed."""

    methods = "methods"
    benchmarks = "benchmarks"
    backbones = "backbones"


class Precision(StrEnum):
    """What the backbone computes in."""

    fp32 = "fp32"
    bf16 = "bf16"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"probprompt {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; the GPU where there is one by default.")]
Track = Annotated[str | None, typer.Option(help="Send numbers to tensorboard, trackio or wandb.")]
Backbone = Annotated[str | None, typer.Option(help="A named checkpoint or any timm arch.tag.")]
Weights = Annotated[str | None, typer.Option(help="A file of weights for that architecture.")]
Tasks = Annotated[
    str | None, typer.Option(help="5, or sizes 4,4,2, or a file of class lists (JSON, or a line per task).")
]
TestFolder = Annotated[Path | None, typer.Option(help="A separate test folder; else a part is held out.")]
Validate = Annotated[
    bool, typer.Option("--validate", help="Hold out 20 % of the training images and report on them, not on test.")
]
SkipUnreadable = Annotated[
    bool, typer.Option("--skip-unreadable", help="Go on without images that cannot be read; they are listed.")
]


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Where the runs are written; runs/demo by default.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Order of classes, initial parameters, batches.")] = 0,
    device: Device = None,
) -> None:
    """Learn 20 classes of emoji in 5 tasks: ProbPrompt beside controls without prompts, all embedded."""
    from probprompt.cli.cmd_train import run_demo

    run_demo(out, seed, device)


@app.command()
def train(
    benchmark: Annotated[
        str | None, typer.Argument(help="A benchmark's name or a folder of class folders.", show_default="emoji-r")
    ] = None,
    method: Annotated[str | None, typer.Option(help="See: probprompt list methods.")] = None,
    preset: Annotated[str | None, typer.Option(help="published, matched, ridge or flagship.")] = None,
    tasks: Tasks = None,
    test: TestFolder = None,
    backbone: Backbone = None,
    weights: Weights = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs per task.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per step.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="All three seeds at once: order, init, data.")] = None,
    order_seed: Annotated[int | None, typer.Option(min=0, help="Order of classes.")] = None,
    init_seed: Annotated[int | None, typer.Option(min=0, help="Initial parameters.")] = None,
    data_seed: Annotated[int | None, typer.Option(min=0, help="Batches, crops and noise.")] = None,
    validate: Validate = False,
    skip_unreadable: SkipUnreadable = False,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings in a TOML file.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; a new one under runs/ by default.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")] = None,
    device: Device = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Train on so many GPUs of this machine: a process each, as by torchrun.")
    ] = None,
    track: Track = None,
) -> None:
    """Learn a benchmark, or a folder of images, task by task."""
    from probprompt.cli.cmd_train import run_train

    given: dict[str, Any] = {
        "data": {"benchmark": benchmark, "tasks": tasks, "test": str(test) if test else None},
        "backbone": {"name": backbone, "weights": weights},
        "method": {"name": method},
        "training": {"epochs": epochs, "batch": batch},
        "seeds": {"order": seed, "init": seed, "data": seed},
    }
    if validate:
        given["data"]["validation"] = _VALIDATION
    if skip_unreadable:
        given["data"]["skip_unreadable"] = True
    for name, value in (("order", order_seed), ("init", init_seed), ("data", data_seed)):
        if value is not None:
            given["seeds"][name] = value
    run_train(given, preset, assignments or [], config, out, resume, device, track, gpus)


@app.command()
def compare(
    grid: Annotated[Path | None, typer.Argument(help="A grid in a TOML file (see examples/compare.toml).")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Methods, with commas between; all: every one.")] = None,
    benchmarks: Annotated[list[str] | None, typer.Option(help="Benchmarks or folders, with commas between.")] = None,
    seeds: Annotated[list[str] | None, typer.Option(help="0,1,2 or 0-4.", show_default="0,1,2")] = None,
    presets: Annotated[
        list[str] | None, typer.Option(help="published, matched, ridge, flagship or custom.", show_default="matched")
    ] = None,
    backbone: Backbone = None,
    weights: Weights = None,
    tasks: Tasks = None,
    test: TestFolder = None,
    validate: Validate = False,
    skip_unreadable: SkipUnreadable = False,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.")
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Values of a setting to try; may be repeated.")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="RUN", help="Tabulate runs that are there: one, a folder of them, or a book."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where runs and tables go; a folder under runs/ by default.")] = None,
    device: Device = None,
    show_only: Annotated[bool, typer.Option("--no-run", help="Only tabulate what is finished.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Cells that run side by side, each in a process.")] = 1,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="ray: started here; ray:auto, ray:HOST:PORT or ray://HOST:PORT: one whose machines share --out.",
        ),
    ] = None,
    gpus_per_cell: Annotated[
        float | None, typer.Option(min=0, help="On Ray; fractions share a GPU.", show_default="1 where there are any")
    ] = None,
    cpus_per_cell: Annotated[float | None, typer.Option(min=0, help="On Ray.", show_default="1")] = None,
    book: Annotated[Path | None, typer.Option(help="Write the records of all runs into one JSONL file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Put the tables into this page of Markdown.")] = None,
) -> None:
    """Run a grid of methods, benchmarks, seeds and settings, and set the results side by side."""
    from probprompt.cli.cmd_compare import run_compare
    from probprompt.runs.executors import ExecutionOptions

    where = ExecutionOptions(workers, on, gpus_per_cell, cpus_per_cell)
    given = {"methods": methods, "benchmarks": benchmarks, "seeds": seeds, "presets": presets}
    own: dict[str, Any] = {"data.tasks": tasks, "data.test": str(test) if test else None}
    own |= {"backbone.name": backbone, "backbone.weights": weights}
    own |= {"data.validation": _VALIDATION if validate else None, "data.skip_unreadable": skip_unreadable or None}
    settings = {name: value for name, value in own.items() if value is not None}
    asked = grid, given, assignments or [], vary or [], runs or []
    run_compare(*asked, out, device, show_only, book, page, where, settings)


@app.command()
def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|MODEL|BENCHMARK]",
            help="A run's or a model's folder; with --method or --all a benchmark.",
            show_default="emoji-r",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Train this method on a few images and audit it.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Train and audit every method.")] = False,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of that training.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Images for a saved model: a folder or a benchmark.")] = None,
    images: Annotated[int | None, typer.Option(min=2, help="How many images: 64 for a model, 32 for a method.")] = None,
    precision: Annotated[Precision, typer.Option(help="What the backbone computes in.")] = Precision.fp32,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the proof to a JSON file, too.")] = None,
) -> None:
    """Prove that predictions depend on their own image alone; a leak is told with exit code 1."""
    from probprompt.cli.cmd_audit import run_audit

    run_audit(target, method, every, assignments or [], data, images, precision.value, device, out)


@app.command()
def bench(
    method: Annotated[str | None, typer.Option(help="What to measure.", show_default="probprompt")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="Several methods, with commas between; all: a cost table of every one.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="As in training, with random weights.", show_default="demo; on a GPU ViT-B/16")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="published, matched, ridge or flagship.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per step.", show_default="16; on a GPU 128")] = None,
    image_size: Annotated[int | None, typer.Option(min=8, help="Side of the images; the backbone's own.")] = None,
    precision: Annotated[Precision | None, typer.Option(help="What the backbone computes in.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.01, help="For each measurement.", show_default="5; 1 where there are many")
    ] = None,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a record in JSON.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="FILE", help="Compare with an earlier record.")] = None,
) -> None:
    """Measure what training and prediction cost on this machine."""
    from probprompt.cli.cmd_bench import run_bench

    given: dict[str, dict[str, Any]] = {
        "backbone": {"name": backbone, "image_size": image_size, "precision": precision and precision.value},
        "training": {"batch": batch},
    }
    run_bench(given, preset, assignments or [], method, methods or [], device, seconds, out, against)


@app.command()
def cache(
    keep: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0, help="Remove images, those used longest ago first, until so much is left."),
    ] = None,
) -> None:
    """Where decoded images are kept, and how much they take."""
    from probprompt.cli.cmd_train import run_cache

    run_cache(keep)


data_app = typer.Typer(no_args_is_help=True, help="Bring published datasets onto this machine, and check them.")
app.add_typer(data_app, name="data")
Quick = Annotated[bool, typer.Option("--quick", help="Only count the images, do not read them.")]


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="cifar100, imagenet-r, cub200, tiny-imagenet or tu-berlin.")],
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where datasets are kept.", show_default="PROBPROMPT_DATA"),
    ] = None,
    url: Annotated[str | None, typer.Option(help="A mirror of the archive; it must have the published hash.")] = None,
    file: Annotated[Path | None, typer.Option(help="The archive, where it is on this machine already.")] = None,
    quick: Quick = False,
) -> None:
    """Fetch a dataset (going on where it was cut), verify, unpack and check it."""
    from probprompt.cli.cmd_data import run_get

    run_get(name, to, url, file, quick)


@data_app.command("check")
def data_check(
    path: Annotated[str, typer.Argument(help="The folder of a dataset, or the name of a benchmark.")],
    benchmark: Annotated[
        str | None, typer.Option(metavar="NAME", help="What it should be; found out by its layout by default.")
    ] = None,
    quick: Quick = False,
) -> None:
    """Compare with the published figures, find unreadable files and images on both sides; exit code 1 on trouble."""
    from probprompt.cli.cmd_data import run_check

    run_check(path, benchmark, quick)


@data_app.command("sample")
def data_sample(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    classes: Annotated[str, typer.Option(help="How many, or their names with commas between.")] = "4",
    images: Annotated[int, typer.Option(min=1, help="Pictures of each class.")] = 12,
    test: Annotated[bool, typer.Option("--test", help="In styles that the others are not drawn in.")] = False,
) -> None:
    """Write pictures to try things with, embedded ones, as a folder of class folders."""
    from probprompt.cli.cmd_data import run_sample

    run_sample(folder, classes, images, test)


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="The folder of a saved classifier, or of a run.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="The format, the only one so far.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the file goes.", show_default="MODEL.onnx, here")
    ] = None,
) -> None:
    """Write a model as one ONNX file, prompts and backbone together, checked against torch with onnxruntime."""
    from probprompt.cli.cmd_share import run_export

    run_export(model, onnx, out)


@app.command()
def push(
    model: Annotated[Path, typer.Argument(help="The folder of a saved classifier, or of a run.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the Hugging Face hub.")],
    private: Annotated[bool, typer.Option("--private", help="Only you and those you allow may see it.")] = False,
    with_statistics: Annotated[
        bool,
        typer.Option(
            "--with-statistics", help="Also what further learning needs: sums, and features of single images."
        ),
    ] = False,
) -> None:
    """Send a model to the Hugging Face hub, with a model card made from its record."""
    from probprompt.cli.cmd_share import run_push

    run_push(model, repository, private, with_statistics)


@app.command()
def pull(
    repository: Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the Hugging Face hub.")],
    model: Annotated[Path, typer.Argument(help="A new folder.")],
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit; the newest by default.")] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The backbone's weights, for a model made with a file of them.")
    ] = None,
) -> None:
    """Fetch a model from the Hugging Face hub; every file is verified, and none is executed."""
    from probprompt.cli.cmd_share import run_pull

    run_pull(repository, model, revision, weights)


@app.command("list")
def list_(what: Annotated[Listed, typer.Argument(help="What to list.")]) -> None:
    """List methods, benchmarks or backbones."""
    from probprompt.cli.cmd_train import run_list

    run_list(what.value)


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="The folder of a classifier, as made by probprompt learn.")],
    host: Annotated[
        str, typer.Option(help="The address to listen at; any but this machine's own needs the token for everything.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A token of your own; PROBPROMPT_TOKEN does, too.", show_default="drawn"),
    ] = None,
    max_upload: Annotated[
        int | None, typer.Option(metavar="MB", min=1, help="What one request may bring.", show_default="512")
    ] = None,
    max_images: Annotated[
        int | None, typer.Option(min=1, help="Images in one request for predictions.", show_default="64")
    ] = None,
    max_pixels: Annotated[
        float | None, typer.Option(metavar="MP", min=0.1, help="Of one image, in millions.", show_default="64")
    ] = None,
    device: Device = None,
) -> None:
    """Serve a classifier over HTTP, with a page to classify and to teach."""
    from probprompt.cli.cmd_share import run_serve

    run_serve(model, host, port, token_file, device, max_upload, max_images, max_pixels)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are compared.")],
    out: Annotated[Path | None, typer.Option(help="The page to write.")] = None,
) -> None:
    """Write report.html of a run, or one that compares several."""
    from probprompt.cli.cmd_train import run_report

    run_report(runs, out)


# A model to use ----------------------------------------------------------------------------------------------------

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a classifier.")]


class Known(StrEnum):
    """What happens to classes that are known already."""

    refuse = "refuse"
    refine = "refine"


@app.command()
def learn(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a classifier, new or there already.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="One folder of images per class.")],
    known: Annotated[
        Known, typer.Option(help="Classes known already: refuse them, or learn their images as more of the same.")
    ] = Known.refuse,
    name: Annotated[str | None, typer.Option(help="What this is called in the history.")] = None,
    method: Annotated[str | None, typer.Option(help="Of a new one; see: probprompt list methods.")] = None,
    preset: Annotated[str | None, typer.Option(help="Of a new one: flagship, ridge, matched or published.")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="Of a new one: demo, or any timm arch.tag.", show_default="a small ViT; on a GPU sup1k"),
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Of a new one: a file of weights for that architecture.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of a new one: epochs where anything is trained.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of a new one: initial parameters, batches.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of a new one: any setting.")
    ] = None,
    keep_versions: Annotated[
        int | None, typer.Option(min=1, help="How many versions can be gone back to.", show_default="10")
    ] = None,
    device: Device = None,
) -> None:
    """Learn new classes from a folder of class folders; the images are not needed again."""
    from probprompt.cli.cmd_model import run_learn

    given = {"method": method, "preset": preset, "backbone": backbone, "epochs": epochs, "seed": seed}
    run_learn(model, folder, known.value, name, given, weights, assignments or [], keep_versions, device)


@app.command()
def predict(
    model: Model,
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Images, or folders with all below them.")],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, with a header.")] = False,
    top_k: Annotated[int, typer.Option(min=1, help="How many classes are named.")] = 1,
    batch: Annotated[int | None, typer.Option(min=1, help="Images looked at together.")] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Another version than the current one.")] = None,
    device: Device = None,
) -> None:
    """Classify images: a row for each, written as it comes; one that cannot be read is a row with its error."""
    from probprompt.cli.cmd_model import run_predict

    run_predict(model, files, as_json, as_csv, top_k, batch, version, device)


@app.command()
def evaluate(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="One folder of images per class.")],
    unknown: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images of no known class: how well are they told apart?")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")] = False,
    version: Annotated[int | None, typer.Option(min=1, help="Another version than the current one.")] = None,
    device: Device = None,
) -> None:
    """Measure accuracy on images whose classes are known: per task, overall, and what was forgotten."""
    from probprompt.cli.cmd_model import run_evaluate

    run_evaluate(model, folder, unknown, as_json, version, device)


@app.command()
def forget(model: Model, name: Annotated[str, typer.Argument(metavar="CLASS", help="The class to forget.")]) -> None:
    """Forget a class, as if its images had never been learned."""
    from probprompt.cli.cmd_model import run_forget

    run_forget(model, name)


@app.command()
def rename(
    model: Model,
    old: Annotated[str, typer.Argument(metavar="CLASS", help="The class to rename.")],
    new: Annotated[str, typer.Argument(metavar="NAME", help="Its new name.")],
) -> None:
    """Give a class another name."""
    from probprompt.cli.cmd_model import run_rename

    run_rename(model, old, new)


@app.command()
def history(
    model: Model, as_json: Annotated[bool, typer.Option("--json", help="A JSON object per line.")] = False
) -> None:
    """List what was learned when, and the versions that can be gone back to."""
    from probprompt.cli.cmd_model import run_history

    run_history(model, as_json)


@app.command()
def rollback(
    model: Model, to: Annotated[int, typer.Option("--to", metavar="N", min=1, help="The version to go back to.")]
) -> None:
    """Make an earlier version the current one again; no version is lost by it."""
    from probprompt.cli.cmd_model import run_rollback

    run_rollback(model, to)
