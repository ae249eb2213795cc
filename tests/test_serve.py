"""The service over HTTP, as clients meet it: predictions, lessons, who may do what, and what is refused."""

import errno
import io
import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image

from page_marks import read_blocks
from probprompt.classifier import ContinualClassifier, changing
from probprompt.classifier.store import Store
from probprompt.serve.batching import Capacity
from probprompt.serve.jobs import JobStore
from probprompt.serve.learn_worker import Request
from probprompt.serve.lessons import title_of
from probprompt.serve.schemas import Job
from probprompt.serve.security import Limits

Emoji = dict[str, dict[str, list[bytes]]]
Serve = Callable[..., Any]


def lesson(name: str, images: list[bytes], **fields: str) -> list[tuple[str, str | bytes]]:
    return [("names", name), *fields.items(), *(("images", image) for image in images)]


def bomb(side: int) -> bytes:
    """A PNG that says it is huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


# Predictions


def test_answers_are_those_of_the_classifier_itself(serve: Serve, small_model: Path, emoji: Emoji) -> None:
    images = [emoji["test"][name][i] for name in ("ball", "bird", "heart") for i in range(3)]
    found = serve().predict(images, top_k=3)
    expected = ContinualClassifier.load(small_model).predict([Image.open(io.BytesIO(i)) for i in images], top_k=3)
    assert found["version"] == 2 and len(found["predictions"]) == len(images)
    for given, right in zip(found["predictions"], expected, strict=True):
        assert (given["label"], given["unknown"], given["error"]) == (right.label, right.unknown, None)
        assert given["probability"] == pytest.approx(right.probability, abs=1e-5)
        assert [entry["label"] for entry in given["top"]] == [label for label, _ in right.top]
        assert given["novelty"] == pytest.approx(right.novelty, abs=1e-4)


def test_an_answer_does_not_depend_on_who_else_is_asking(serve: Serve, emoji: Emoji) -> None:
    served = serve()
    images = [image for name in ("ball", "boat", "moon") for image in emoji["test"][name][:8]]
    alone = [served.predict([image], top_k=4)["predictions"][0] for image in images]
    with ThreadPoolExecutor(24) as crowd:
        together = list(crowd.map(lambda image: served.predict([image], top_k=4)["predictions"][0], images))
    assert served.service.metrics.text().count("probprompt_batch_images_bucket") > 0
    assert "probprompt_predicted_images_total 48" in served.get("/metrics").body.decode()
    batches = float(served.service.metrics.text().split("probprompt_batch_images_count ")[1].split()[0])
    assert batches < 48, "no batch was formed across requests"
    for one, other in zip(alone, together, strict=True):
        assert one["label"] == other["label"] and one["unknown"] == other["unknown"]
        assert [e["label"] for e in one["top"]] == [e["label"] for e in other["top"]]
        assert [e["probability"] for e in one["top"]] == pytest.approx(
            [e["probability"] for e in other["top"]], abs=1e-5
        )


def test_one_image_may_be_the_whole_body(serve: Serve, emoji: Emoji) -> None:
    served, image = serve(), emoji["test"]["ball"][0]
    answer = served.ask("POST", "/api/predict?top_k=2", image, Content_Type="image/png")
    assert answer.status == 200 and len(answer.json["predictions"][0]["top"]) == 2
    assert answer.json["predictions"][0]["label"] == served.predict([image])["predictions"][0]["label"]


def test_a_file_that_is_no_image_has_its_reason_and_others_their_answers(serve: Serve, emoji: Emoji) -> None:
    good = emoji["test"]["ball"][0]
    harmful = [
        b"",
        b"no image",
        good[: len(good) // 2],
        bomb(60_000),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    ]
    served = serve()
    rows = served.predict([good, *harmful, good])["predictions"]
    assert [row["error"] is None for row in rows] == [True, *[False] * len(harmful), True]
    assert rows[0]["label"] == rows[-1]["label"] and rows[1]["label"] is None
    assert "more than 64000000 pixels" in rows[4]["error"]
    assert all("/" not in row["error"] and "Traceback" not in row["error"] for row in rows if row["error"])


@pytest.mark.parametrize(
    ("body", "kind", "status", "words"),
    [
        (b"{}", "application/json", 400, "multipart/form-data"),
        (b"", "", 400, "of no type"),
        (b"--edge--\r\n", "multipart/form-data; boundary=edge", 400, "no image"),
        (b"anything", "multipart/form-data", 400, "boundary"),
    ],
)
def test_a_question_without_images_is_told_what_to_send(
    serve: Serve, body: bytes, kind: str, status: int, words: str
) -> None:
    answer = serve().ask("POST", "/api/predict", body, **({"Content_Type": kind} if kind else {}))
    assert answer.status == status and words in answer.json["error"]


# Limits


def test_size_count_and_pixels_are_limited(serve: Serve, emoji: Emoji) -> None:
    served = serve(limits=Limits(pixels=5000, image_bytes=20_000, images=3, upload_bytes=60_000))
    image = emoji["test"]["ball"][0]
    assert served.form("/api/predict", [("images", image)] * 3).status == 200
    assert served.form("/api/predict", [("images", image)] * 4).status == 413
    assert served.form("/api/predict", [("images", bytes(20_001))]).status == 413
    assert served.ask("POST", "/api/predict", bytes(20_001), Content_Type="image/png").status == 413
    assert served.ask("POST", "/api/predict", bytes(60_001), Content_Type="image/png").status == 413
    large = io.BytesIO()
    Image.new("RGB", (100, 51)).save(large, "PNG")
    assert "5100" in str(100 * 51) and "more than 5000" in served.predict([large.getvalue()])["predictions"][0]["error"]
    assert served.get("/api/model").status == 200


def test_a_body_of_unsaid_length_is_cut_off(serve: Serve) -> None:
    served = serve(limits=Limits(image_bytes=10_000, upload_bytes=10_000))
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as line:
        head = f"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: image/png\r\n"
        line.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):  # the last goes beyond the limit; whatever came after it might meet a closed door
            line.sendall(b"1000\r\n" + bytes(0x1000) + b"\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 413")


def test_more_than_may_wait_is_refused_at_once(serve: Serve, emoji: Emoji) -> None:
    served = serve()
    served.service.capacity = Capacity(4, 2**30)
    answer = served.form("/api/predict", [("images", emoji["test"]["ball"][0])] * 5)
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    served.service.capacity = Capacity(64, 100_000)
    answer = served.form("/api/predict", [("images", emoji["test"]["ball"][0])] * 20)
    assert answer.status == 503 and (served.service.capacity.images, served.service.capacity.bytes) == (0, 0)


def test_a_full_disk_is_told_and_leaves_nothing(serve: Serve, emoji: Emoji, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    answer = served.form("/api/teach", lesson("heart", emoji["train"]["heart"]), token=True)
    assert answer.status == 507 and "the disk is full" in answer.json["error"]
    assert list((served.service.folder / "serve" / "jobs").iterdir()) == []
    monkeypatch.setattr(SpooledTemporaryFile, "write", write)
    asked = served.form("/api/predict", [("images", emoji["test"]["ball"][0])])
    assert asked.status == 507 and asked.json == {"error": "the disk is full: make room on it"}


# Who may do what


def test_on_this_machine_asking_is_open_and_teaching_needs_the_token(serve: Serve, emoji: Emoji) -> None:
    served, images = serve(), emoji["train"]["heart"][:3]
    for path in ("/", "/app.js", "/style.css", "/api/model", "/api/history", "/api/jobs", "/metrics", "/openapi.json"):
        assert served.get(path).status == 200, path
    for method, path in (("POST", "/api/teach"), ("POST", "/api/rollback"), ("DELETE", "/api/jobs/1")):
        answer = served.ask(method, path, b"{}", Content_Type="application/json")
        assert answer.status == 401 and "token is needed" in answer.json["error"], path
        wrong = served.ask(method, path, b"{}", Content_Type="application/json", Authorization="Bearer wrong")
        assert wrong.status == 401 and "not the right one" in wrong.json["error"], path
    assert served.form("/api/teach", lesson("heart", images)).status == 401
    assert served.service.jobs.all() == []


def test_any_other_address_needs_the_token_for_everything(serve: Serve) -> None:
    served = serve(host="0.0.0.0")
    for path in ("/api/model", "/api/history", "/api/jobs", "/metrics", "/openapi.json", "/api/accuracy"):
        assert served.get(path).status == 401, path
        assert served.get(path, token=True).status == 200, path
    assert served.ask("POST", "/api/predict", b"x", Content_Type="image/png").status == 401
    assert served.get("/").status == 200 and served.get("/health").status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "192.0.2.1", "["])
def test_a_name_that_is_not_ours_is_refused(serve: Serve, host: str) -> None:
    answer = serve().get("/api/model", Host=host)
    assert answer.status == 421 and host in answer.json["error"]


def test_pages_of_others_are_refused(serve: Serve) -> None:
    served = serve()
    assert served.get("/api/model", Origin="https://evil.example", token=True).status == 403
    assert served.get("/api/model", Origin="http://[").status == 403
    assert served.get("/api/model", Origin=served.address).status == 200


def test_browsers_are_told_to_trust_nothing_else(serve: Serve) -> None:
    served = serve()
    for path in ("/", "/api/model", "/nothing", "/api/jobs/7"):
        headers = served.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert "server" not in headers


@pytest.mark.parametrize(
    "path", ["/../current.json", "/%2e%2e/current.json", "/page/../app.py", "//etc/passwd", "/serve/jobs"]
)
def test_no_path_reaches_the_disk(serve: Serve, path: str) -> None:
    assert serve().get(path).status == 404


# Teaching


def test_a_lesson_is_learned_while_predictions_go_on_then_switches_and_can_be_undone(
    serve: Serve, emoji: Emoji
) -> None:
    served = serve()
    versions: set[int] = set()
    stop, failures = threading.Event(), list[object]()

    def keep_asking() -> None:
        while not stop.is_set():
            try:
                answer = served.predict([emoji["test"]["ball"][0], emoji["test"]["boat"][0]])
                versions.add(answer["version"])
                time.sleep(0.05)
            except (AssertionError, OSError) as problem:
                failures.append(problem)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    parts: list[tuple[str, str | bytes]] = [("names", "Ball"), ("names", "../../heart <b>"), ("known", "refine")]
    for place, name in enumerate(("ball", "heart")):
        for image in emoji["train"][name][:6]:
            parts += [("images", image), ("of", str(place))]
    accepted = served.form("/api/teach", parts, token=True)
    assert accepted.status == 202 and accepted.json["state"] == "waiting"
    assert accepted.json["classes"][0] == {"name": "ball", "images": 6}  # in the spelling in which it is known
    job = served.finished(accepted.json["id"])
    after = served.predict([emoji["train"]["heart"][0]])
    stop.set()
    asking.join()
    assert failures == [] and 2 in versions and versions <= {2, 3}
    assert (job["state"], job["before"], job["version"]) == ("done", 2, 3)
    assert job["report"]["images"] == 12 and job["report"]["classes"] == ["../../heart <b>", "ball"]
    assert all(0 <= risk["share"] <= 1 for risk in job["report"]["retention"])
    assert after["version"] == 3 and after["predictions"][0]["label"] == "../../heart <b>"
    assert served.get("/api/model").json["classes"][-1] == "../../heart <b>"
    assert [version["number"] for version in served.get("/api/history").json["versions"]] == [3, 2, 1]
    files = [path for path in (served.service.folder / "serve" / "jobs").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["job.json"], "the images of a finished lesson are still there"

    body = json.dumps({"to": job["before"]}).encode()
    undone = served.ask("POST", "/api/rollback", body, token=True, Content_Type="application/json")
    assert undone.status == 202 and served.finished(undone.json["id"])["version"] == 4
    assert served.get("/api/model").json["classes"] == ["ball", "boat", "bird", "fruit"]
    assert ContinualClassifier.load(served.service.folder).version == 4
    jobs = served.get("/metrics").body.decode()
    assert 'probprompt_jobs_total{kind="teach",state="done"} 1' in jobs and "probprompt_model_version 4" in jobs


def test_a_known_class_is_not_taught_again_unasked(serve: Serve, emoji: Emoji) -> None:
    served = serve()
    again = served.form("/api/teach", lesson("Ball", emoji["train"]["ball"][:3]), token=True)
    assert again.status == 409 and "known=refine" in again.json["error"]
    assert served.get("/api/jobs").json == {"jobs": []}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([("images", b"x")], "name each class once"),
        ([("names", "a"), ("names", "A"), ("images", b"x")], "name each class once"),
        ([("names", " \n"), ("images", b"x")], "0 characters"),
        ([("names", "a\u202eb"), ("images", b"x")], "printable"),
        ([("names", "x" * 101), ("images", b"x")], "101 characters"),
        ([("names", "a")], "no image"),
        ([("names", "a"), ("names", "b"), ("images", b"x")], "field 'of'"),
        ([("names", "a"), ("names", "b"), ("images", b"x"), ("of", "2")], "field 'of'"),
        ([("names", "a"), ("names", "b"), ("images", b"x"), ("of", "0")], "no image of 'b'"),
        ([("names", "a"), ("images", b"x"), ("known", "maybe")], "allowed: refuse, refine"),
        ([("names", "a"), ("images", b"x")], "no image of 'a' can be used"),
    ],
)
def test_a_lesson_that_makes_no_sense_is_told_why(
    serve: Serve, parts: list[tuple[str, str | bytes]], words: str
) -> None:
    served = serve()
    answer = served.form("/api/teach", parts, token=True)
    assert answer.status == 400 and words in answer.json["error"], answer
    assert served.get("/api/jobs").json == {"jobs": []}
    assert list((served.service.folder / "serve" / "jobs").iterdir()) == []


def test_going_back_to_what_is_not_kept_is_refused(serve: Serve) -> None:
    served = serve()
    for body, words in ((b'{"to": 9}', "version 9 is not kept"), (b'{"to": "x"}', "to"), (b'{"path": "/etc"}', "to")):
        answer = served.ask("POST", "/api/rollback", body, token=True, Content_Type="application/json")
        assert answer.status == 400 and words in answer.json["error"]
    assert served.get("/api/jobs/1").status == 404 and served.get("/api/jobs/x").status == 400


def test_a_lesson_can_be_given_up(serve: Serve, emoji: Emoji) -> None:
    served = serve()
    with Store(served.service.folder).locked():  # the first lesson waits, so that there is time to give it up
        first = served.form("/api/teach", lesson("heart", emoji["train"]["heart"][:3]), token=True).json["id"]
        second = served.form("/api/teach", lesson("moon", emoji["train"]["moon"][:3]), token=True).json["id"]
        assert served.ask("DELETE", f"/api/jobs/{second}", token=True).json["state"] == "cancelled"
        served.ask("DELETE", f"/api/jobs/{first}", token=True)
        assert served.finished(first)["state"] == "cancelled"
    assert served.get("/api/model").json["version"] == 2


def test_a_process_that_is_dead_before_it_is_told_anything_says_nothing(serve: Serve) -> None:
    command = [sys.executable, "-c", ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.wait()
        assert (
            serve().service.lessons._listen(
                Job(id=1, kind="teach", created=""), process, Request(images={}, refine=False, name="")
            )
            is None
        )


# Stopping


def test_no_accepted_lesson_is_lost_when_the_service_stops_or_is_killed(
    small_model: Path, tmp_path: Path, serve: Serve, emoji: Emoji
) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    served = serve(folder)
    with Store(folder).locked():  # the lesson lasts until the service is stopped
        number = served.form("/api/teach", lesson("heart", emoji["train"]["heart"][:5]), token=True).json["id"]
        while served.get(f"/api/jobs/{number}").json["state"] == "waiting":
            time.sleep(0.01)
        served.stop()  # in the middle of it
        assert json.loads((folder / "serve/jobs/1/job.json").read_text())["state"] == "running"
        command = [sys.executable, "-u", "-m", "probprompt", "serve", str(folder), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
            assert service.stdout is not None
            address = service.stdout.readline().split()[-1]
            while json.load(urlopen(f"{address}/api/jobs/1"))["progress"] is None:
                time.sleep(0.05)
            service.kill()  # in the middle of it again
    assert ContinualClassifier.load(folder).version == 2
    again = serve(folder)
    assert again.finished(number)["state"] == "done"
    assert again.get("/api/model").json["classes"][-1] == "heart"


def test_a_lesson_that_was_saved_just_before_the_end_is_not_learned_twice(
    small_model: Path, tmp_path: Path, serve: Serve, emoji: Emoji
) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    draft = JobStore(folder / "serve" / "jobs").draft()
    for number, image in enumerate(emoji["train"]["heart"][:4]):
        draft.add_image(0, number, image)
    job = draft.accept(kind="teach", state="running", classes=[{"name": "heart", "images": 4}])
    classifier = ContinualClassifier.load(folder)
    images = [Image.open(io.BytesIO(image)) for image in emoji["train"]["heart"][:4]]
    classifier.learn({"heart": images}, name=title_of(job))
    classifier.save(folder)  # and here the service was killed
    served = serve(folder)
    assert served.finished(job.id)["version"] == served.get("/api/model").json["version"] == 3


def test_a_second_service_on_the_same_model_is_refused(
    serve: Serve, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from probprompt.errors import UserError
    from probprompt.serve import service

    served = serve()
    monkeypatch.setattr(service, "LOCK_SECONDS", 0.2)
    with pytest.raises(UserError, match="another service"):
        serve(served.service.folder)


def test_a_change_that_somebody_else_makes_is_followed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from probprompt.serve import lessons

    monkeypatch.setattr(lessons, "IDLE_SECONDS", 0.05)
    served = serve()
    other = ContinualClassifier.load(served.service.folder)
    other.rename("ball", "sphere")
    other.save(served.service.folder)
    until = time.monotonic() + 10
    while (model := served.get("/api/model").json)["version"] == 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert model["version"] == 3 and model["classes"][0] == "sphere"


def test_a_lesson_and_an_undoing_wait_for_somebody_else_who_changes_the_model(serve: Serve, emoji: Emoji) -> None:
    served = serve()
    with changing(served.service.folder) as other:  # as `probprompt rename` at the same time
        other.rename("ball", "sphere")
        number = served.form("/api/teach", lesson("heart", emoji["train"]["heart"][:5]), token=True).json["id"]
        until = time.monotonic() + 30
        while "another process" not in str(served.get(f"/api/jobs/{number}").json["progress"]):
            assert time.monotonic() < until, served.get(f"/api/jobs/{number}").json
            time.sleep(0.05)
    job = served.finished(number)
    assert (job["state"], job["before"], job["version"]) == ("done", 3, 4)
    assert served.get("/api/model").json["classes"] == ["sphere", "boat", "bird", "fruit", "heart"]

    def undo() -> int:
        body = json.dumps({"to": 3}).encode()
        answer = served.ask("POST", "/api/rollback", body, token=True, Content_Type="application/json")
        return int(answer.json["id"])

    with Store(served.service.folder).locked():
        given_up, waiting = undo(), undo()
        while served.get(f"/api/jobs/{given_up}").json["state"] == "waiting":
            time.sleep(0.01)
        served.ask("DELETE", f"/api/jobs/{given_up}", token=True)
        assert served.finished(given_up)["state"] == "cancelled"
    job = served.finished(waiting)
    assert (job["state"], job["before"], job["version"]) == ("done", 4, 5)


def test_an_undoing_that_was_saved_just_before_the_end_is_not_done_twice(
    small_model: Path, tmp_path: Path, serve: Serve
) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    job = JobStore(folder / "serve" / "jobs").draft().accept(kind="rollback", state="running", to=1)
    with changing(folder) as classifier:
        classifier.rollback(1)  # and here the service was killed
    served = serve(folder)
    assert served.finished(job.id)["version"] == served.get("/api/model").json["version"] == 3


# What people see


def test_history_accuracy_and_prompts(serve: Serve) -> None:
    served = serve()
    newest, oldest = served.get("/api/history").json["versions"]
    assert (newest["what"], newest["classes"], newest["current"]) == ("learned", ["bird", "fruit"], True)
    assert (oldest["number"], oldest["images"], oldest["known"], oldest["current"]) == (1, 24, 2, False)
    matrix = served.get("/api/accuracy").json
    assert matrix["steps"] == ["1", "2"] and [len(row["cells"]) for row in matrix["rows"]] == [2, 2]
    assert matrix["rows"][1]["cells"][0] is None and 0 <= matrix["rows"][0]["cells"][1]["value"] <= 100
    figures = served.get("/api/prompts").json
    assert len(figures["figures"]) == 2 and "<svg" in figures["figures"][0]["svg"]
    assert "Mean similarity" in figures["note"] and " style=" not in figures["figures"][0]["svg"]


def test_openapi_describes_every_route(serve: Serve) -> None:
    found = serve().get("/openapi.json").json
    assert set(found["paths"]) == {
        *("/api/predict", "/api/model", "/api/history", "/api/accuracy", "/api/prompts", "/api/teach"),
        *("/api/rollback", "/api/jobs", "/api/jobs/{number}", "/metrics", "/health"),
    }
    form = found["paths"]["/api/teach"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert set(form["properties"]) == {"names", "images", "of", "known"}


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    from importlib.resources import files

    for name in ("index.html", "app.js", "style.css", "icon.svg"):
        text = files("probprompt.serve").joinpath("page", name).read_text(encoding="utf-8")
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert "innerHTML" not in text and "eval(" not in text


# The command


def test_the_command_bears_many_clients_and_stops_when_told_to(small_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    tool = load_tool()
    found = tool.measure_served(folder, tool.drawings(), 32, 3.0)
    assert found["errors"] == 0 and found["first_error"] is None, found
    assert found["requests"] > 32 and np.isfinite(found["ms"]["p99"])
    assert found["exit_code"] == 0 and found["output"][0].startswith(f"serving {folder} at http://127.0.0.1:")
    assert "/#token=" in found["output"][1] and found["output"][-1] == "stopped"


def load_tool() -> Any:
    """The script that measures a service under load."""
    path = Path(__file__).parent.parent / "tools" / "load_serve.py"
    spec = spec_from_file_location("load_serve", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "holds no classifier"),
        (("nowhere", "--host", "256.1.1.1"), "cannot be used"),
        (("nowhere", "--token-file", "missing"), "cannot be read"),
    ],
)
def test_mistakes_are_told_in_words(
    probprompt: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = probprompt("serve", *arguments, "--port", "0")
    assert answer.code == 2 and words in answer.err and "Traceback" not in answer.err


def test_a_short_token_is_refused(
    probprompt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROBPROMPT_TOKEN", "secret")
    answer = probprompt("serve", tmp_path, "--port", "0")
    assert answer.code == 2 and "6 characters" in answer.err


def test_what_the_page_on_serving_says_works_as_pasted(
    serve: Serve, emoji: Emoji, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("curl"):
        pytest.skip("there is no curl")
    served = serve()
    (block,) = [block for block in read_blocks("docs/serve.md") if block.mark.elsewhere]
    for name, image in zip(("a.jpg", "b.jpg", "a.png", "1.jpg", "2.jpg"), emoji["train"]["clock"], strict=False):
        (tmp_path / name).write_bytes(image)
    monkeypatch.chdir(tmp_path)
    lines = block.code.replace("\\\n", " ").strip().splitlines()
    assert len(lines) == 6
    answers = []
    for line in lines:
        command = line.replace("http://127.0.0.1:8000", served.address).replace("$TOKEN", served.token)
        done = subprocess.run(["bash", "-c", f"{command} --silent --fail"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (line, done.stderr)
        answers.append(json.loads(done.stdout))
        if "state" in answers[-1]:
            served.finished(answers[-1]["id"])
    asked, alone, taught, job, history, back = answers
    assert len(asked["predictions"]) == 2 and len(asked["predictions"][0]["top"]) == 3
    assert len(alone["predictions"]) == 1
    assert taught["id"] == job["id"] == 1 and job["state"] == "done"
    assert "sailboat" in history["versions"][0]["classes"] and served.finished(back["id"])["state"] == "done"
