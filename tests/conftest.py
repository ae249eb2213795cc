"""Small, real things to test with: a folder of pictures and a tiny vision transformer."""

import http.client
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from probprompt.cli import main
from probprompt.data import emoji_r

# Two test processes share two cores, so one thread each; another number checks that no test depends on it.
torch.set_num_threads(int(os.environ.get("PROBPROMPT_TEST_THREADS", "1")))

# Without a GPU, kernels run in Triton's interpreter; Triton must know before anything imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# What is compared is compared in float32, also on a processor that would compute in bf16.
torch.cpu.get_capabilities = dict  # type: ignore[assignment]

# Whoever starts the tests in the background may have told them to ignore Ctrl-C, and so every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests stop runs after epochs that take no time at all.
os.environ["PROBPROMPT_CHECKPOINTS"] = "all"

TINY = {"name": "test_vit", "weights": "random", "image_size": 32}
"""timm's own test model, 64 wide and 6 deep."""


def paint(folder: Path, classes: int = 6, images: int = 10, side: int = 36) -> Path:
    """Write class folders whose pictures share a coarse pattern."""
    random = np.random.RandomState(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        pattern = np.kron(random.randint(0, 255, (4, 4, 3)), np.ones((side // 4, side // 4, 1)))
        for index in range(images):
            noisy = pattern + random.normal(0, 30, pattern.shape)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"class{label}" / f"{index}.png")
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes of ten pictures."""
    return paint(tmp_path_factory.mktemp("data") / "pictures")


Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(pictures: Path) -> Settings:
    """Settings of a run of a few seconds; groups given by name are laid over them."""

    def build(**groups: dict[str, Any]) -> dict[str, Any]:
        base: dict[str, dict[str, Any]] = {
            "data": {"benchmark": str(pictures), "tasks": 3},
            "backbone": TINY,
            "method": {"name": "probprompt", "samples": 3, "components": 4, "tokens": 4, "blocks": [0, 2]},
            "training": {"epochs": 2, "batch_size": 8},
            "alignment": {"epochs": 2},
        }
        return {name: {**base.get(name, {}), **groups.get(name, {})} for name in {**base, **groups}}

    return build


class Answer(NamedTuple):
    """What a command gave back."""

    code: int
    out: str
    err: str


@pytest.fixture
def probprompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command line, without a new process; other programs by their ``main``."""

    def run(*arguments: object, main: Callable[[], None] = main) -> Answer:
        monkeypatch.setattr(sys, "argv", ["probprompt", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return Answer(int(end.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def reproduction(probprompt: Callable[..., Answer]) -> Callable[..., Answer]:
    """``python -m reproduction``, without a new process."""
    from reproduction.__main__ import main

    return partial(probprompt, main=main)


@pytest.fixture
def count_queries(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[int]]:
    """How many images each call of a workshop's backbone without prompts looks at, from now on."""

    def watch(workshop: Any) -> list[int]:
        backbone, images = workshop.learner.model.backbone, list[int]()
        original = backbone.query

        def counting(pictures: Tensor, *readout: str, **more: int) -> Tensor:
            images.append(len(pictures))
            seen: Tensor = original(pictures, *readout, **more)
            return seen

        monkeypatch.setattr(backbone, "query", counting)
        return images

    return watch


def png(pixels: Any) -> bytes:
    """Pixels as a PNG file."""
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


@pytest.fixture(scope="session")
def emoji() -> dict[str, dict[str, list[bytes]]]:
    """The embedded drawings as PNG files, by side (train, test) and class."""
    found: dict[str, dict[str, list[bytes]]] = {"train": {}, "test": {}}
    for image, row in zip(*emoji_r.read(), strict=True):
        own = found[row.split].setdefault(row.label, [])
        if len(own) < 12:
            own.append(png(image))
    return found


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory, emoji: dict[str, dict[str, list[bytes]]]) -> Path:
    """A saved classifier that knows ball and boat, then bird and fruit, of twelve drawings each."""
    from probprompt.classifier import ContinualClassifier

    classifier = ContinualClassifier(backbone="demo", epochs=1, projections=200)
    for names in (("ball", "boat"), ("bird", "fruit")):
        classifier.learn({name: [Image.open(io.BytesIO(data)) for data in emoji["train"][name]] for name in names})
    folder = tmp_path_factory.mktemp("small") / "model"
    classifier.save(folder)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy of the classifier that a module saves, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


class Reply(NamedTuple):
    """What a service answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The answer's content."""
        return json.loads(self.body)


class Served:
    """A service on a free port of this machine, in a thread, and a client of it."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", limits: Any = None) -> None:
        from probprompt.serve.routes import Server, address_of, listen
        from probprompt.serve.security import Limits, make_access
        from probprompt.serve.service import Service

        listening = listen(host, 0)
        self.port = listening.getsockname()[1]
        self.address = address_of(listening).replace("0.0.0.0", "127.0.0.1")
        access = make_access(host, None)
        self.token = access.token
        self.service = Service(folder, access, limits or Limits())
        ready = threading.Event()
        self._server = Server(self.service, listening, ready.set)
        self._thread = threading.Thread(target=self._server.work)
        self._thread.start()
        assert ready.wait(30), "the service did not start"

    def stop(self) -> None:
        """Stop as a signal would."""
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def ask(self, method: str, path: str, body: bytes | None = None, token: bool = False, **headers: str) -> Reply:
        """Send one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            named["Authorization"] = f"Bearer {self.token}"
        try:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **more: Any) -> Reply:
        """Ask for something."""
        return self.ask("GET", path, **more)

    def form(self, path: str, parts: list[tuple[str, str | bytes]], token: bool = False, **headers: str) -> Reply:
        """Send a form: text, and bytes as files."""
        body = b""
        for number, (name, value) in enumerate(parts):
            about = f'; filename="{number}.png"\r\nContent-Type: image/png' if isinstance(value, bytes) else ""
            body += f'--edge\r\nContent-Disposition: form-data; name="{name}"{about}\r\n\r\n'.encode()
            body += (value if isinstance(value, bytes) else value.encode()) + b"\r\n"
        headers["Content_Type"] = "multipart/form-data; boundary=edge"
        return self.ask("POST", path, body + b"--edge--\r\n", token, **headers)

    def roll_back(self, to: object) -> Reply:
        """Ask for a version to become the current one again."""
        body = json.dumps({"to": to}).encode()
        return self.ask("POST", "/api/rollback", body, token=True, Content_Type="application/json")

    def teach(self, name: str, images: list[bytes], token: bool = True, **fields: str) -> Reply:
        """Ask for a class to be learned."""
        parts: list[tuple[str, str | bytes]] = [("names", name), *fields.items()]
        return self.form("/api/teach", [*parts, *(("images", image) for image in images)], token)

    def predict(self, images: list[bytes], top_k: int = 1) -> Any:
        """Classify images."""
        answer = self.form(f"/api/predict?top_k={top_k}", [("images", image) for image in images])
        assert answer.status == 200, answer
        return answer.json

    def finished(self, number: int, seconds: float = 60) -> Any:
        """Wait until a job is finished."""
        until = time.monotonic() + seconds
        while (job := self.get(f"/api/jobs/{number}").json)["state"] not in ("done", "failed", "cancelled"):
            assert time.monotonic() < until, f"not finished in time: {job}"
            time.sleep(0.05)
        return job


@contextmanager
def services(small_model: Path, root: Path) -> Iterator[Callable[..., Served]]:
    """Start services, each on a new copy of the model or on a given folder; stop them at the end."""
    running: list[Served] = []

    def start(folder: Path | None = None, **more: Any) -> Served:
        folder = folder or Path(shutil.copytree(small_model, root / f"model{len(running)}"))
        running.append(Served(folder, **more))
        return running[-1]

    yield start
    for served in running:
        served.stop()


@pytest.fixture
def serve(small_model: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts services for one test."""
    with services(small_model, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def served(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that no test may change."""
    with services(small_model, tmp_path_factory.mktemp("served")) as start:
        yield start()
