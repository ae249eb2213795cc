"""The commands ``export``, ``push``, ``pull`` and ``serve``: hand a model on."""

import os
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from probprompt.cli.console import Device, Screen
from probprompt.errors import UserError

if TYPE_CHECKING:
    from probprompt.export.push_pull import Moved

NEEDED = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
TOKEN_VARIABLE = "PROBPROMPT_TOKEN"
SavedModel = Annotated[Path, Argument(help="The folder of a saved classifier, or of a run.")]
Repository = Annotated[str, Argument(metavar="REPO", help="owner/name on the Hugging Face hub.")]


def export(
    model: SavedModel,
    onnx: Annotated[bool, Option("--onnx", help="The format, the only one so far.")] = False,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Where the file goes.", show_default="MODEL.onnx, here")
    ] = None,
) -> None:
    """Write a model as one ONNX file, prompts and backbone together, checked against torch with onnxruntime."""
    if not onnx:
        raise UserError("name the format of the file: probprompt export MODEL --onnx")
    from probprompt.export.onnx import BATCHES, export_onnx

    screen = Screen()
    with screen.stage("writing ONNX", 1):
        done = export_onnx(model, out or Path(f"{model.resolve().name}.onnx"))
        screen.advance(1)
    size, outputs = f"{len(done.classes)} classes, {done.bytes / 1e6:.1f} MB", " and ".join(done.outputs)
    screen.print(f"{done.path}: {size}; answers {outputs}")
    batches, difference = ", ".join(map(str, BATCHES)), f"{done.difference:.0e}"
    screen.print(f"checked with onnxruntime on batches of {batches}: probabilities differ by {difference} from torch's")


def push(
    model: SavedModel,
    repository: Repository,
    private: Annotated[bool, Option("--private", help="Only you and those you allow may see it.")] = False,
    with_statistics: Annotated[
        bool, Option("--with-statistics", help="Also what further learning needs: sums, and features of single images.")
    ] = False,
) -> None:
    """Send a model to the Hugging Face hub, with a model card made from its record."""
    from probprompt.export import push_pull

    screen = Screen()
    done = push_pull.push(model, repository, private=private, with_statistics=with_statistics, progress=screen)
    _show_transfer(screen, done)
    if not done.statistics:
        screen.print("without what further learning needs: add it with --with-statistics")
    screen.print(f"to fetch it: probprompt pull {quote(repository)} FOLDER")


def pull(
    repository: Repository,
    model: Annotated[Path, Argument(help="A new folder.")],
    revision: Annotated[str | None, Option(help="A branch, tag or commit; the newest by default.")] = None,
    weights: Annotated[
        Path | None, Option(metavar="FILE", help="The backbone's weights, for a model made with a file of them.")
    ] = None,
) -> None:
    """Fetch a model from the Hugging Face hub; every file is verified, and none is executed."""
    from probprompt.export import push_pull

    screen = Screen()
    done = push_pull.pull(repository, model, revision=revision, weights=weights, progress=screen)
    _show_transfer(screen, done)
    without = "predicts, but was published without what learning needs"
    screen.print(f"{model}: {'can learn further classes' if done.statistics else without}")


def _show_transfer(screen: Screen, done: "Moved") -> None:
    screen.print(f"{done.url} at {done.commit[:12]}: {done.files} files, {done.bytes / 1e6:.1f} MB, all verified")


def serve(
    model: Annotated[Path, Argument(help="The folder of a classifier, as made by probprompt learn.")],
    host: Annotated[
        str, Option(help="The address to listen at; any but this machine's own needs the token for everything.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes one that is free.")] = 8000,
    token_file: Annotated[
        Path | None,
        Option(metavar="FILE", help="A token of your own; PROBPROMPT_TOKEN does, too.", show_default="drawn"),
    ] = None,
    max_upload: Annotated[
        int | None, Option(metavar="MB", min=1, help="What one request may bring.", show_default="512")
    ] = None,
    max_images: Annotated[
        int | None, Option(min=1, help="Images in one request for predictions.", show_default="64")
    ] = None,
    max_pixels: Annotated[
        float | None, Option(metavar="MP", min=0.1, help="Of one image, in millions.", show_default="64")
    ] = None,
    device: Device = None,
) -> None:
    """Serve a classifier over HTTP, with a page to classify and to teach."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}: install them with pip install 'probprompt[serve]'")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: its threads share the cores with requests
    from probprompt.serve import routes
    from probprompt.serve.security import Limits, make_access

    default = Limits()
    limits = Limits(
        pixels=int(max_pixels * 1e6) if max_pixels else default.pixels,
        images=max_images or default.images,
        upload_bytes=max_upload * 2**20 if max_upload else default.upload_bytes,
    )
    token, screen = _read_token(token_file), Screen()
    access = make_access(host, token)
    with routes.listen(host, port) as listening:
        address = routes.address_of(listening)

        def ready(service: object) -> None:
            page = address if token else f"{address}/#token={access.token}"
            screen.print(f"serving {model} at {address}")
            screen.print(f"open {page}")
            if not access.loopback:
                screen.print("every request needs the token; the connection is not encrypted: put TLS before it")
            screen.print("stop with Ctrl-C: lessons that were accepted are kept and taken up at the next start")

        routes.serve(model, listening, access, limits, device, ready)
    screen.print("stopped")


def _read_token(file: Path | None) -> str | None:
    """Read the token that the user chose: in a file, or in the environment, where no other user sees it."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"the token cannot be read from {file}: {problem}") from None
