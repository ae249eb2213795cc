"""What ``probprompt export``, ``push`` and ``pull`` do: hand a model on."""

import os
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from probprompt.cli.console import Screen
from probprompt.errors import UserError
from probprompt.export.push_pull import Moved


def run_export(model: Path, onnx: bool, out: Path | None) -> None:
    """Write a model as an ONNX file, in the current folder and called after it unless said otherwise."""
    if not onnx:
        raise UserError("name the format of the file: probprompt export MODEL --onnx")
    from probprompt.export.onnx import BATCHES, export_onnx

    screen = Screen()
    with screen.stage("writing ONNX", 1):
        done = export_onnx(model, out or Path(f"{model.resolve().name}.onnx"))
        screen.advance(1)
    batches = ", ".join(map(str, BATCHES))
    screen.say(
        f"{done.path}: {len(done.classes)} classes, {done.bytes / 1e6:.1f} MB; answers {' and '.join(done.outputs)}"
    )
    screen.say(
        f"checked with onnxruntime on batches of {batches}: probabilities differ by {done.difference:.0e} from torch's"
    )


def run_push(model: Path, repository: str, private: bool, with_statistics: bool) -> None:
    """Send a model to the hub."""
    from probprompt.export.push_pull import push

    screen = Screen()
    done = push(model, repository, private=private, with_statistics=with_statistics, progress=screen)
    _tell(screen, done)
    if not done.statistics:
        screen.say("without what further learning needs: add it with --with-statistics")
    screen.say(f"to fetch it: probprompt pull {quote(repository)} FOLDER")


def run_pull(repository: str, model: Path, revision: str | None, weights: Path | None) -> None:
    """Fetch a model from the hub."""
    from probprompt.export.push_pull import pull

    screen = Screen()
    done = pull(repository, model, revision=revision, weights=weights, progress=screen)
    _tell(screen, done)
    further = (
        "can learn further classes" if done.statistics else "predicts, but was published without what learning needs"
    )
    screen.say(f"{model}: {further}")


def _tell(screen: Screen, done: Moved) -> None:
    screen.say(f"{done.url} at {done.commit[:12]}: {done.files} files, {done.bytes / 1e6:.1f} MB, all verified")


NEEDED = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")


TOKEN_VARIABLE = "PROBPROMPT_TOKEN"


def run_serve(
    model: Path,
    host: str,
    port: int,
    token_file: Path | None,
    device: str | None,
    upload_megabytes: int | None,
    images: int | None,
    megapixels: float | None,
) -> None:
    """Serve a model until the process is told to stop."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}: install them with pip install 'probprompt[serve]'")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: its threads share the cores with requests
    from probprompt.serve.routes import address_of, listen, serve
    from probprompt.serve.security import Limits, make_access

    usual = Limits()
    limits = Limits(
        pixels=int(megapixels * 1e6) if megapixels else usual.pixels,
        images=images or usual.images,
        upload_bytes=upload_megabytes * 2**20 if upload_megabytes else usual.upload_bytes,
    )
    own = read_token(token_file)
    access = make_access(host, own)
    screen = Screen()
    with listen(host, port) as listening:
        address = address_of(listening)

        def ready(service: object) -> None:
            page = address if own else f"{address}/#token={access.token}"
            screen.say(f"serving {model} at {address}")
            screen.say(f"open {page}")
            if not access.loopback:
                screen.say("every request needs the token; the connection is not encrypted: put TLS before it")
            screen.say("stop with Ctrl-C: lessons that were accepted are kept and taken up at the next start")

        serve(model, listening, access, limits, device, ready)
    screen.say("stopped")


def read_token(file: Path | None) -> str | None:
    """The token that the user chose: in a file, or in the environment, where no other user sees it."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"the token cannot be read from {file}: {problem}") from None
