"""The command that serves a model."""

import os
from importlib.util import find_spec
from pathlib import Path

from probprompt.cli.screen import Screen
from probprompt.errors import UserError

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
    from probprompt.serve.run import address_of, listen, serve
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
