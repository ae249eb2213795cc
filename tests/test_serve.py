"""The service over HTTP: predictions, lessons, access, and rejected requests."""

import errno
import io
import json
import shutil
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image

from page_world import read_blocks
from probprompt.classifier import ContinualClassifier, changing
from probprompt.classifier.store import Store
from probprompt.errors import UserError
from probprompt.serve.batching import Capacity
from probprompt.serve.jobs import JobStore
from probprompt.serve.learn_worker import Request
from probprompt.serve.lessons import title_of
from probprompt.serve.schemas import Job
from probprompt.serve.security import Limits

Emoji = dict[str, dict[str, list[bytes]]]
Serve = Callable[..., Any]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.02)


def bomb(side: int) -> bytes:
    """Return a PNG whose header states a huge size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def test_answers_are_those_of_the_classifier_itself(served: Any, small_model: Path, emoji: Emoji) -> None:
    images = [emoji["test"][name][i] for name in ("ball", "bird", "heart") for i in range(3)]
    found = served.predict(images, top_k=3)
    expected = ContinualClassifier.load(small_model).predict([Image.open(io.BytesIO(i)) for i in images], top_k=3)
    assert found["version"] == 2 and len(found["predictions"]) == len(images)
    for given, right in zip(found["predictions"], expected, strict=True):
        assert (given["label"], given["unknown"], given["error"]) == (right.label, right.unknown, None)
        assert given["probability"] == pytest.approx(right.probability, abs=1e-5)
        assert [entry["label"] for entry in given["top"]] == [label for label, _ in right.top]
        assert given["novelty"] == pytest.approx(right.novelty, abs=1e-4)
    answer = served.ask("POST", "/api/predict?top_k=2", images[0], Content_Type="image/png")  # as the whole body
    assert answer.status == 200 and len(answer.json["predictions"][0]["top"]) == 2
    assert answer.json["predictions"][0]["label"] == expected[0].label


def test_answer_does_not_depend_on_other_requests(serve: Serve, emoji: Emoji) -> None:
    served = serve()
    images = [image for name in ("ball", "boat", "moon") for image in emoji["test"][name][:8]]
    alone = [served.predict([image], top_k=4)["predictions"][0] for image in images]
    with ThreadPoolExecutor(24) as crowd:
        together = list(crowd.map(lambda image: served.predict([image], top_k=4)["predictions"][0], images))
    metrics = served.get("/metrics").body.decode()
    assert "probprompt_batch_images_bucket" in metrics and "probprompt_predicted_images_total 48" in metrics
    batches = float(metrics.split("probprompt_batch_images_count ")[1].split()[0])
    assert batches < 48, "no batch was formed across requests"
    for one, other in zip(alone, together, strict=True):
        assert one["label"] == other["label"] and one["unknown"] == other["unknown"]
        assert [entry["label"] for entry in one["top"]] == [entry["label"] for entry in other["top"]]
        probabilities = [entry["probability"] for entry in other["top"]]
        assert [entry["probability"] for entry in one["top"]] == pytest.approx(probabilities, abs=1e-5)


def test_file_that_is_not_an_image_gets_a_reason(served: Any, emoji: Emoji) -> None:
    good = emoji["test"]["ball"][0]
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    harmful = [b"", b"no image", good[: len(good) // 2], bomb(60_000), postscript]
    rows = served.predict([good, *harmful, good])["predictions"]
    assert [row["error"] is None for row in rows] == [True, *[False] * len(harmful), True]
    assert rows[0]["label"] == rows[-1]["label"] and rows[1]["label"] is None
    assert "64000000 pixels" in rows[4]["error"]
    assert all("/" not in row["error"] and "Traceback" not in row["error"] for row in rows if row["error"])


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b"{}", "application/json", "multipart/form-data"),
        (b"", "", "'none'"),
        (b"--edge--\r\n", "multipart/form-data; boundary=edge", "No image"),
        (b"anything", "multipart/form-data", "boundary"),
    ],
)
def test_request_without_images_gets_a_remedy(served: Any, body: bytes, kind: str, words: str) -> None:
    answer = served.ask("POST", "/api/predict", body, **({"Content_Type": kind} if kind else {}))
    assert answer.status == 400 and words in answer.json["error"]


def test_size_count_and_pixels_are_limited(serve: Serve, emoji: Emoji) -> None:
    served = serve(limits=Limits(pixels=5000, image_bytes=20_000, images=3, upload_bytes=60_000))
    image = emoji["test"]["ball"][0]
    for images, status in (([image] * 3, 200), ([image] * 4, 413), ([bytes(20_001)], 413)):
        assert served.form("/api/predict", [("images", one) for one in images]).status == status
    for size in (20_001, 60_001):
        assert served.ask("POST", "/api/predict", bytes(size), Content_Type="image/png").status == 413
    large = io.BytesIO()
    Image.new("RGB", (100, 51)).save(large, "PNG")
    assert "5000" in served.predict([large.getvalue()])["predictions"][0]["error"]
    assert served.get("/api/model").status == 200


def test_body_of_unknown_length_is_limited(serve: Serve) -> None:
    served = serve(limits=Limits(image_bytes=10_000, upload_bytes=10_000))
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as line:
        head = f"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: image/png\r\n"
        line.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):  # the last goes beyond the limit; later writes might fail
            line.sendall(b"1000\r\n" + bytes(0x1000) + b"\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 413")


def test_requests_beyond_capacity_are_rejected(serve: Serve, emoji: Emoji) -> None:
    served = serve()
    served.service.capacity = Capacity(4, 2**30)
    answer = served.form("/api/predict", [("images", emoji["test"]["ball"][0])] * 5)
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    served.service.capacity = Capacity(64, 100_000)
    answer = served.form("/api/predict", [("images", emoji["test"]["ball"][0])] * 20)
    assert answer.status == 503 and (served.service.capacity.images, served.service.capacity.bytes) == (0, 0)


def test_full_disk_is_reported_and_leaves_nothing(serve: Serve, emoji: Emoji, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    answer = served.teach("heart", emoji["train"]["heart"])
    assert answer.status == 507 and "The disk is full" in answer.json["error"]
    assert list((served.service.folder / "serve" / "jobs").iterdir()) == []
    monkeypatch.setattr(SpooledTemporaryFile, "write", write)
    asked = served.form("/api/predict", [("images", emoji["test"]["ball"][0])])
    assert asked.status == 507 and "The disk is full" in asked.json["error"]


def test_only_teaching_needs_the_token_on_localhost(served: Any, emoji: Emoji) -> None:
    for path in ("/", "/app.js", "/style.css", "/api/model", "/api/history", "/api/jobs", "/metrics", "/openapi.json"):
        assert served.get(path).status == 200, path
    for method, path in (("POST", "/api/teach"), ("POST", "/api/rollback"), ("DELETE", "/api/jobs/1")):
        answer = served.ask(method, path, b"{}", Content_Type="application/json")
        assert answer.status == 401 and "token is required" in answer.json["error"], path
        wrong = served.ask(method, path, b"{}", Content_Type="application/json", Authorization="Bearer wrong")
        assert wrong.status == 401 and "Wrong token" in wrong.json["error"], path
    assert served.teach("heart", emoji["train"]["heart"][:3], token=False).status == 401
    assert served.service.jobs.all() == []


def test_other_addresses_need_the_token_for_everything(serve: Serve) -> None:
    served = serve(host="0.0.0.0")
    for path in ("/api/model", "/api/history", "/api/jobs", "/metrics", "/openapi.json", "/api/accuracy"):
        assert served.get(path).status == 401, path
        assert served.get(path, token=True).status == 200, path
    assert served.ask("POST", "/api/predict", b"x", Content_Type="image/png").status == 401
    assert served.get("/").status == 200 and served.get("/health").status == 200


def test_other_hosts_and_origins_are_rejected(served: Any) -> None:
    for host in ("evil.example", "evil.example:8000", "192.0.2.1", "["):
        answer = served.get("/api/model", Host=host)
        assert answer.status == 421 and host in answer.json["error"]
    assert served.get("/api/model", Origin="https://evil.example", token=True).status == 403
    assert served.get("/api/model", Origin="http://[").status == 403
    assert served.get("/api/model", Origin=served.address).status == 200


def test_headers_restrict_browsers(served: Any) -> None:
    for path in ("/", "/api/model", "/nothing", "/api/jobs/7"):
        headers = served.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'"), path
        assert "unsafe" not in headers["content-security-policy"] and "server" not in headers
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"


def test_no_path_reaches_the_disk(served: Any) -> None:
    for path in ("/../current.json", "/%2e%2e/current.json", "/page/../app.py", "//etc/passwd", "/serve/jobs"):
        assert served.get(path).status == 404, path


def test_lesson_is_learned_during_predictions_and_undone(serve: Serve, emoji: Emoji) -> None:
    served, train = serve(), emoji["train"]
    parts: list[tuple[str, str | bytes]] = [("names", "Ball"), ("names", "../../heart <b>"), ("known", "refine")]
    for place, name in enumerate(("ball", "heart")):
        for image in train[name][:6]:
            parts += [("images", image), ("of", str(place))]
    accepted = served.form("/api/teach", parts, token=True)
    assert accepted.status == 202 and accepted.json["state"] == "waiting"
    assert accepted.json["classes"][0] == {"name": "ball", "images": 6}  # in the spelling of the existing class
    versions = set[int]()
    while served.get(f"/api/jobs/{accepted.json['id']}").json["state"] in ("waiting", "running"):
        versions.add(served.predict([emoji["test"]["ball"][0], emoji["test"]["boat"][0]])["version"])
    job = served.finished(accepted.json["id"])
    after = served.predict([train["heart"][0]])
    assert 2 in versions and versions <= {2, 3}
    assert (job["state"], job["before"], job["version"]) == ("done", 2, 3)
    assert job["report"]["images"] == 12 and job["report"]["classes"] == ["../../heart <b>", "ball"]
    assert all(0 <= risk["share"] <= 1 for risk in job["report"]["retention"])
    assert after["version"] == 3 and after["predictions"][0]["label"] == "../../heart <b>"
    assert served.get("/api/model").json["classes"][-1] == "../../heart <b>"
    assert [version["number"] for version in served.get("/api/history").json["versions"]] == [3, 2, 1]
    files = [path for path in (served.service.folder / "serve" / "jobs").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["job.json"], "the images of a finished lesson are still there"

    undone = served.roll_back(job["before"])
    assert undone.status == 202 and served.finished(undone.json["id"])["version"] == 4
    assert served.get("/api/model").json["classes"] == ["ball", "boat", "bird", "fruit"]
    assert ContinualClassifier.load(served.service.folder).version == 4
    jobs = served.get("/metrics").body.decode()
    assert 'probprompt_jobs_total{kind="teach",state="done"} 1' in jobs and "probprompt_model_version 4" in jobs


def test_invalid_lessons_get_a_reason(served: Any, emoji: Emoji) -> None:
    image = ("images", b"x")
    two = [("names", "a"), ("names", "b"), image]
    for parts, words in (
        ([image], "distinct class names"),
        ([("names", "a"), ("names", "A"), image], "distinct class names"),
        ([("names", " \n"), image], "0 characters"),
        ([("names", "a\u202eb"), image], "visible"),
        ([("names", "x" * 101), image], "101 characters"),
        ([("names", "a")], "No image"),
        (two, "fields 'of'"),
        ([*two, ("of", "2")], "fields 'of'"),
        ([*two, ("of", "0")], "No image of 'b'"),
        ([("names", "a"), image, ("known", "maybe")], "'refine'"),
        ([("names", "a"), image], "No usable image of 'a'"),
    ):
        answer = served.form("/api/teach", parts, token=True)
        assert answer.status == 400 and words in answer.json["error"], answer
    again = served.teach("Ball", emoji["train"]["ball"][:3])
    assert again.status == 409 and "known=refine" in again.json["error"]
    for to, words in ((9, "Version 9 is not kept"), ("x", "to"), (None, "to")):
        answer = served.roll_back(to)
        assert answer.status == 400 and words in answer.json["error"]
    assert served.get("/api/jobs").json == {"jobs": []}
    assert list((served.service.folder / "serve" / "jobs").iterdir()) == []
    assert served.get("/api/jobs/1").status == 404 and served.get("/api/jobs/x").status == 400


def test_lesson_can_be_canceled(serve: Serve, emoji: Emoji) -> None:
    served = serve()
    with Store(served.service.folder).locked():  # the first lesson waits, so that it can be canceled
        first, second = (served.teach(name, emoji["train"][name][:3]).json["id"] for name in ("heart", "moon"))
        assert served.ask("DELETE", f"/api/jobs/{second}", token=True).json["state"] == "cancelled"
        served.ask("DELETE", f"/api/jobs/{first}", token=True)
        assert served.finished(first)["state"] == "cancelled"
    assert served.get("/api/model").json["version"] == 2


def test_process_that_ended_early_has_no_message(served: Any) -> None:
    with subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.wait()
        job, asked = Job(id=1, kind="teach", created=""), Request(images={}, refine=False, name="")
        assert served.service.lessons._listen(job, process, asked) is None


def test_no_accepted_lesson_is_lost_when_killed(small_model: Path, tmp_path: Path, serve: Serve, emoji: Emoji) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    served = serve(folder)
    with Store(folder).locked():  # the lesson lasts until the service is stopped
        number = served.teach("heart", emoji["train"]["heart"][:5]).json["id"]
        wait_until(lambda: served.get(f"/api/jobs/{number}").json["state"] != "waiting")
        served.stop()  # in the middle of it
        assert json.loads((folder / "serve/jobs/1/job.json").read_text())["state"] == "running"
        command = [sys.executable, "-u", "-m", "probprompt", "serve", str(folder), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
            assert service.stdout is not None
            address = service.stdout.readline().split()[-1]
            wait_until(lambda: json.load(urlopen(f"{address}/api/jobs/1"))["progress"] is not None)
            service.kill()  # in the middle of it again
    assert ContinualClassifier.load(folder).version == 2
    again = serve(folder)
    assert again.finished(number)["state"] == "done"
    assert again.get("/api/model").json["classes"][-1] == "heart"


@pytest.mark.parametrize("kind", ["teach", "rollback"])
def test_saved_job_is_not_done_twice(small_model: Path, tmp_path: Path, serve: Serve, emoji: Emoji, kind: str) -> None:
    folder, images = shutil.copytree(small_model, tmp_path / "model"), emoji["train"]["heart"][:4]
    draft = JobStore(folder / "serve" / "jobs").draft()
    with changing(folder) as classifier:
        if kind == "teach":
            for number, image in enumerate(images):
                draft.add_image(0, number, image)
            job = draft.accept(kind="teach", state="running", classes=[{"name": "heart", "images": 4}])
            classifier.learn({"heart": [Image.open(io.BytesIO(image)) for image in images]}, note=title_of(job))
        else:
            job = draft.accept(kind="rollback", state="running", to=1)
            classifier.rollback(1)
    served = serve(folder)  # the service had been killed here
    assert served.finished(job.id)["version"] == served.get("/api/model").json["version"] == 3


def test_second_service_on_a_model_is_rejected(served: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probprompt.serve.service.LOCK_SECONDS", 0.2)
    with pytest.raises(UserError, match="Another service"):
        serve(served.service.folder)


def test_change_by_another_process_is_followed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probprompt.serve.lessons.IDLE_SECONDS", 0.05)
    served = serve()
    with changing(served.service.folder) as other:
        other.rename("ball", "sphere")
    wait_until(lambda: served.get("/api/model").json["version"] == 3)
    assert served.get("/api/model").json["classes"][0] == "sphere"


def test_jobs_wait_for_another_process(serve: Serve, emoji: Emoji) -> None:
    served = serve()
    with changing(served.service.folder) as other:  # as `probprompt model rename` at the same time
        other.rename("ball", "sphere")
        number = served.teach("heart", emoji["train"]["heart"][:5]).json["id"]
        wait_until(lambda: "another process" in str(served.get(f"/api/jobs/{number}").json["progress"]))
    job = served.finished(number)
    assert (job["state"], job["before"], job["version"]) == ("done", 3, 4)
    assert served.get("/api/model").json["classes"] == ["sphere", "boat", "bird", "fruit", "heart"]
    with Store(served.service.folder).locked():
        canceled, waiting = (served.roll_back(3).json["id"] for _ in range(2))
        wait_until(lambda: served.get(f"/api/jobs/{canceled}").json["state"] != "waiting")
        served.ask("DELETE", f"/api/jobs/{canceled}", token=True)
        assert served.finished(canceled)["state"] == "cancelled"
    job = served.finished(waiting)
    assert (job["state"], job["before"], job["version"]) == ("done", 4, 5)


def test_history_accuracy_and_prompts(served: Any) -> None:
    newest, oldest = served.get("/api/history").json["versions"]
    assert (newest["what"], newest["classes"], newest["current"]) == ("learned", ["bird", "fruit"], True)
    assert (oldest["number"], oldest["images"], oldest["known"], oldest["current"]) == (1, 24, 2, False)
    model, matrix = served.get("/api/model").json, served.get("/api/accuracy").json
    held_out = [row["cells"][1]["value"] for row in matrix["rows"]]
    assert (model["held_out_images"], model["random_guess"]) == (8, 25) and model["accuracy"] == np.mean(held_out)
    assert matrix["steps"] == ["1", "2"] and [len(row["cells"]) for row in matrix["rows"]] == [2, 2]
    assert matrix["rows"][1]["cells"][0] is None and 0 <= matrix["rows"][0]["cells"][1]["value"] <= 100
    figures = served.get("/api/prompts").json
    assert len(figures["figures"]) == 2 and "<svg" in figures["figures"][0]["svg"]
    assert "Mean similarity" in figures["note"] and ' data-style="' in figures["figures"][0]["svg"]


def test_openapi_describes_every_route(served: Any) -> None:
    found = served.get("/openapi.json").json
    assert set(found["paths"]) == {
        *("/api/predict", "/api/model", "/api/history", "/api/accuracy", "/api/prompts", "/api/teach"),
        *("/api/rollback", "/api/jobs", "/api/jobs/{number}", "/metrics", "/health"),
    }
    form = found["paths"]["/api/teach"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert set(form["properties"]) == {"names", "images", "of", "known"}


def test_page_needs_no_external_resources(served: Any) -> None:
    for name in ("", "app.js", "style.css", "icon.svg"):
        text = served.get(f"/{name}").body.decode()
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert "innerHTML" not in text and "eval(" not in text


def test_command_serves_many_clients(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "tools")
    tool, folder = import_module("load_serve"), shutil.copytree(small_model, tmp_path / "model")
    found = tool.measure_served(folder, tool.drawings(), 32, 3.0)
    assert found["errors"] == 0 and found["first_error"] is None, found
    assert found["requests"] > 32 and np.isfinite(found["ms"]["p99"])
    assert found["exit_code"] == 0 and found["output"][0].startswith(f"Serving {folder} at http://127.0.0.1:")
    assert "/#token=" in found["output"][1] and found["output"][-1] == "Stopped."


def test_invalid_arguments_are_reported(
    probprompt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, token, words in (
        ((), "", "does not exist"),
        (("--host", "256.1.1.1"), "", "256.1.1.1 port 0"),
        (("--token-file", "missing"), "", "token from missing"),
        ((), "secret", "6 characters"),
    ):
        monkeypatch.setenv("PROBPROMPT_TOKEN", token)
        answer = probprompt("serve", "nowhere", *arguments, "--port", "0")
        assert answer.code == 2 and words in answer.err and "Traceback" not in answer.err


def test_commands_of_the_serving_page_work(
    serve: Serve, emoji: Emoji, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("curl"):
        pytest.skip("there is no curl")
    served = serve()
    (block,) = [block for block in read_blocks("docs/serve.md") if block.is_elsewhere]
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
