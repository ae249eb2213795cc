"""Commands ``export``, ``model push``, ``model pull`` and ``serve``."""

import os
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

from probprompt.cli.cmd_model import app
from probprompt.cli.console import WEIGHTS, Device, Screen, argument, option
from probprompt.errors import UserError

if TYPE_CHECKING:
    from probprompt.export.push_pull import TransferReport

NEEDED = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
TOKEN_VARIABLE = "PROBPROMPT_TOKEN"
SavedModel = Annotated[Path, argument("Model folder or run folder.", "MODEL")]
Repository = Annotated[str, argument("owner/name on the Hugging Face Hub.", "REPO")]
LIMITS = "Limits"  # a panel


def export(
    model: SavedModel, out: Annotated[Path | None, option("ONNX file to write.", "FILE", default="MODEL.onnx")] = None
) -> None:
    """Export a model to ONNX.

    The file holds backbone, prompts and head, and is checked against PyTorch.

    Example: probprompt export my-model
    """
    from probprompt.export.onnx import BATCHES, export_onnx

    screen = Screen()
    with screen.stage("writing ONNX", 1):
        done = export_onnx(model, out or Path(f"{model.resolve().name}.onnx"))
        screen.advance(1)
    classes, outputs = f"{len(done.classes)} classes, {done.bytes / 1e6:.1f} MB", " and ".join(done.outputs)
    screen.print(f"Wrote {done.path}: {classes}, outputs {outputs}.")
    batches, difference = ", ".join(map(str, BATCHES)), f"{done.difference:.0e}"
    screen.print(f"Checked with onnxruntime (batch sizes {batches}): probabilities within {difference} of PyTorch.")


@app.command()
def push(
    model: SavedModel,
    repository: Repository,
    private: Annotated[bool, option("Make the repository private.", None, "--private")] = False,
    trainable: Annotated[
        bool, option("Include the statistics needed to teach the model more classes.", None, "--trainable")
    ] = False,
) -> None:
    """Upload a model to the Hugging Face Hub.

    A model card is written from its record.

    Example: probprompt model push my-model OWNER/NAME
    """
    from probprompt.export import push_pull

    screen = Screen()
    done = push_pull.push(model, repository, private=private, with_statistics=trainable, progress=screen)
    _show_transfer(screen, "Uploaded", done)
    if not done.statistics:
        screen.print("The uploaded model cannot learn more classes. To change this, push again with --trainable.")
    screen.print(f"Download it with 'probprompt model pull {quote(repository)} FOLDER'.")


@app.command()
def pull(
    repository: Repository,
    model: Annotated[Path, argument("New folder for the model.", "MODEL")],
    revision: Annotated[str | None, option("Branch, tag or commit.", "REV", default="latest")] = None,
    weights: Annotated[Path | None, option(**WEIGHTS)] = None,
) -> None:
    """Download a model from the Hugging Face Hub.

    Every file is verified, and none is executed. Pass --weights if the model was created with it.
    """
    from probprompt.export import push_pull

    screen = Screen()
    done = push_pull.pull(repository, model, revision=revision, weights=weights, progress=screen)
    _show_transfer(screen, "Downloaded", done)
    ability = "The model can learn more classes." if done.statistics else "The model predicts but cannot learn."
    screen.print(f"Saved {model}. {ability}")


def _show_transfer(screen: Screen, action: str, done: "TransferReport") -> None:
    screen.print(f"{action} {done.files} files, {done.bytes / 1e6:.1f} MB, verified: {done.url} at {done.commit[:12]}")


def serve(
    model: Annotated[Path, argument("Model folder, as created by 'probprompt learn'.", "MODEL")],
    host: Annotated[
        str, option("Address to bind. Only localhost may predict without the token.", "ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[int, option("Port; 0 picks a free one.", "N", min=0, max=65535)] = 8000,
    token_file: Annotated[
        Path | None, option("File with your token; or set PROBPROMPT_TOKEN.", "FILE", default="random token")
    ] = None,
    device: Device = None,
    max_upload: Annotated[
        int | None, option("Largest request in MB.", "MB", default="512", min=1, panel=LIMITS)
    ] = None,
    max_images: Annotated[
        int | None, option("Images per prediction request.", "N", default="64", min=1, panel=LIMITS)
    ] = None,
    max_pixels: Annotated[
        float | None, option("Largest image in megapixels.", "MP", default="64", min=0.1, panel=LIMITS)
    ] = None,
) -> None:
    """Serve a model over HTTP, with a web page.

    The page classifies images and teaches new classes.

    Example: probprompt serve my-model
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"Missing packages: {', '.join(missing)}. Install them with pip install 'probprompt[serve]'.")
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
            screen.print(f"Serving {model} at {address}")
            screen.print(f"Open {page}")
            if not access.loopback:
                screen.print(
                    "Every request needs the token. The connection is not encrypted; put a TLS proxy before it."
                )
            screen.print("Press Ctrl-C to stop. Accepted lessons are kept and resume at the next start.")

        routes.serve(model, listening, access, limits, device, ready)
    screen.print("Stopped.")


def _read_token(file: Path | None) -> str | None:
    """Read the user's token from a file, or from the environment, which other users cannot see."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"Cannot read the token from {file}: {problem}") from None
