"""Parts of the service, each alone: decoding, batches, jobs, metrics, and who may ask."""

import asyncio
import io
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from probprompt.classifier import ContinualClassifier, Prediction
from probprompt.data.images import read_image
from probprompt.errors import UserError
from probprompt.serve import jobs
from probprompt.serve.batching import Answer, Batcher, Capacity, OverloadedError
from probprompt.serve.jobs import JobStore
from probprompt.serve.lessons import JobRunner
from probprompt.serve.schemas import Job, JobChanges, Progress
from probprompt.serve.security import Access, make_access
from probprompt.serve.service import SECONDS, Metrics
from probprompt.serve.uploads import Decoders, RefusedImageError, each, plain


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **how)
    return written.getvalue()


PHOTO = Image.fromarray(np.random.RandomState(0).randint(0, 255, (90, 120, 3)).astype(np.uint8))


# Decoding


def decoded(work: Callable[[Decoders], Any], pixels: int = 1_000_000, seconds: float = 20.0) -> Any:
    """Return the result of work with a single decoding process."""

    async def run() -> Any:
        decoders = Decoders(1, pixels, 48, seconds)
        try:
            return await work(decoders)
        finally:
            await decoders.close()

    return asyncio.run(run())


def test_pixels_are_those_of_the_file(tmp_path: Path) -> None:
    gray_alpha = encoded(PHOTO.convert("LA"), "PNG")
    turned = PHOTO.getexif()
    turned[0x0112] = 6
    files = [encoded(PHOTO, "PNG"), gray_alpha, encoded(PHOTO, "JPEG", exif=turned), encoded(PHOTO, "WEBP")]

    async def work(decoders: Decoders) -> None:
        for data in files:
            (tmp_path / "file").write_bytes(data)
            expected = read_image(tmp_path / "file", 48)
            assert np.array_equal(await decoders.pixels_of(data), expected)
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(await decoders.png_of(data)))), expected)

    decoded(work)


def test_heic_photos_are_read_with_their_extra(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    written = io.BytesIO()
    heif.from_pillow(PHOTO).save(written, quality=90)
    large = io.BytesIO()
    heif.from_pillow(Image.new("RGB", (1200, 1000))).save(large)

    async def work(decoders: Decoders) -> None:
        found = await decoders.pixels_of(written.getvalue())
        (tmp_path / "file").write_bytes(written.getvalue())
        assert found.shape == (48, 64, 3) and np.array_equal(found, read_image(tmp_path / "file", 48))
        with pytest.raises(RefusedImageError, match="limit of 1000000"):
            await decoders.pixels_of(large.getvalue())
        with pytest.raises(RefusedImageError):
            await decoders.pixels_of(written.getvalue()[:200])
        assert decoders.deaths == 0

    decoded(work)


def test_harmful_images_are_rejected_and_decoding_continues() -> None:
    strip = encoded(Image.new("L", (1, 5000)), "PNG")
    program = encoded(PHOTO, "EPS")
    large = encoded(Image.new("1", (2000, 2000)), "PNG")

    async def work(decoders: Decoders) -> int:
        for data, words in ((strip, "100 times"), (program, "not a supported image format"), (large, "1000000")):
            with pytest.raises(RefusedImageError, match=words):
                await decoders.pixels_of(data)
        await decoders.pixels_of(encoded(PHOTO, "PNG"))
        return decoders.deaths

    assert decoded(work) == 0


def test_decoder_that_dies_or_hangs_is_replaced() -> None:
    async def work(decoders: Decoders) -> None:
        good = encoded(PHOTO, "PNG")
        await decoders.pixels_of(good)
        process = decoders._all[0]._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # as one that never finishes
        with pytest.raises(RefusedImageError, match="within 1 s"):
            await decoders.pixels_of(good)
        await decoders.pixels_of(good)
        process = decoders._all[0]._process
        assert process is not None
        process.send_signal(signal.SIGKILL)  # as one that a corrupted file crashed
        with pytest.raises(RefusedImageError, match="corrupted"):
            await decoders.pixels_of(good)
        assert (await decoders.pixels_of(good)).shape == (48, 64, 3)
        assert decoders.deaths == 2

    decoded(work, seconds=1.0)


def test_decoder_cannot_write_files_or_exceed_memory() -> None:
    async def work(decoders: Decoders) -> str:
        await decoders.pixels_of(encoded(PHOTO, "PNG"))
        process = decoders._all[0]._process
        assert process is not None
        return Path(f"/proc/{process.pid}/limits").read_text()

    if not Path("/proc/self/limits").exists():
        pytest.skip("this system does not tell the limits of a process")
    lines = {line[:26].strip(): line[26:].split() for line in decoded(work).splitlines()}
    assert lines["Max file size"][0] == "0" and int(lines["Max address space"][0]) < 2**30


# Batches


class Slow:
    """A classifier that records batch sizes and can be blocked."""

    classes = ("dark", "light")

    def __init__(self, version: int) -> None:
        self.version, self.batches, self.go = version, list[int](), threading.Event()
        self.go.set()

    def predict(self, images: list[Any], top_k: int) -> list[Prediction]:
        self.go.wait()
        self.batches.append(len(images))
        if any(np.asarray(image).size == 0 for image in images):
            raise ValueError("an empty image")
        found = []
        for place, image in enumerate(images):
            light = float(np.asarray(image).mean() / 255)
            top = (("light", light), ("dark", 1 - light))
            found.append(Prediction(str(place), "light", light, top[:top_k], False, 0.0))
        return found


def batched(work: Callable[[Batcher, Slow], Any], **how: Any) -> Any:
    async def run() -> Any:
        slow = Slow(1)
        batcher = Batcher(cast(ContinualClassifier, slow), lambda images, unknown: None, **how)
        try:
            return await work(batcher, slow)
        finally:
            slow.go.set()
            await asyncio.to_thread(batcher.close)

    return asyncio.run(run())


def gray(level: int) -> Any:
    return np.full((4, 4, 3), level, np.uint8)


def test_requests_are_gathered_and_each_gets_its_own() -> None:
    async def work(batcher: Batcher, slow: Slow) -> None:
        slow.go.clear()
        waiting = [batcher.predict([gray(level)] * (level % 3 + 1), level % 2 + 1) for level in range(9)]
        asked = [asyncio.create_task(one) for one in waiting]
        await asyncio.sleep(0.05)
        slow.go.set()
        for level, answer in enumerate(await asyncio.gather(*asked)):
            assert [p.probability for p in answer.predictions] == pytest.approx([level / 255] * (level % 3 + 1))
            assert all(len(p.top) == level % 2 + 1 for p in answer.predictions)
        assert len(slow.batches) <= 4 and sum(slow.batches) == 18 and max(slow.batches) <= 8

    batched(work, most=8, window=0.02)


def test_images_of_a_request_are_answered_by_one_version() -> None:
    async def work(batcher: Batcher, slow: Slow) -> None:
        slow.go.clear()
        before = asyncio.create_task(batcher.predict([gray(1)] * 20, 1))
        await asyncio.sleep(0.05)
        batcher.classifier = cast(ContinualClassifier, Slow(2))
        slow.go.set()
        assert (await before).version == 1 and len((await before).predictions) == 20
        assert (await batcher.predict([gray(1)], 1)).version == 2

    batched(work, most=8)


def test_failing_request_does_not_fail_others() -> None:
    async def work(batcher: Batcher, slow: Slow) -> None:
        empty = np.zeros((0, 4, 3), np.uint8)
        outcomes = await asyncio.gather(
            *(batcher.predict([image], 1) for image in (gray(1), empty, gray(3))), return_exceptions=True
        )
        assert isinstance(outcomes[1], ValueError)
        assert [isinstance(outcome, Answer) for outcome in outcomes] == [True, False, True]

    batched(work, window=0.05)


def test_closing_answers_waiting_requests() -> None:
    async def work(batcher: Batcher, slow: Slow) -> None:
        slow.go.clear()
        waiting = asyncio.create_task(batcher.predict([gray(5)] * 3, 1))
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        slow.go.set()
        assert len((await waiting).predictions) == 3
        await closing

    batched(work)


def test_capacity_counts_images_and_bytes() -> None:
    capacity = Capacity(images=4, size=100)
    with capacity.reserve(3) as hold:
        with pytest.raises(OverloadedError), capacity.reserve(2):
            pass
        hold(gray(1))  # 48 bytes
        hold(gray(1))
        with pytest.raises(OverloadedError):
            hold(gray(1))
        assert (capacity.images, capacity.bytes) == (3, 96)
    assert (capacity.images, capacity.bytes) == (0, 0)


def test_each_starts_and_leaves_nothing_after_a_failure() -> None:
    begun, ended = list[int](), list[int]()

    async def work(number: int) -> int:
        begun.append(number)
        await asyncio.sleep(0.01 * (number + 1))
        if number == 0:
            raise OSError("full")
        ended.append(number)
        return number

    with pytest.raises(OSError, match="full"):
        asyncio.run(each(work, range(50), 3))
    assert begun == [0, 1, 2] and ended == [1, 2]
    assert asyncio.run(each(work, [3, 2, 1], 2)) == [3, 2, 1]


# Jobs


def accepted(store: JobStore, name: str = "cat") -> Job:
    draft = store.draft()
    draft.add_image(0, 0, b"png")
    return draft.accept(kind="teach", classes=[{"name": name, "images": 1}])


def test_job_is_complete_or_absent(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job = accepted(store)
    unfinished = store.draft()
    unfinished.add_image(0, 0, b"png")  # and here the power fails
    again = JobStore(tmp_path)
    assert [one.id for one in again.all()] == [job.id] and again.get(job.id) == job
    assert [path.read_bytes() for path in again.images(job)["cat"]] == [b"png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(job.id)]
    assert again.draft().number > job.id


def test_no_name_becomes_a_path(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    job = accepted(store, "../../outside")
    names = {path.relative_to(tmp_path / "jobs").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"1/job.json", "1/images/0/0.png"}
    assert list(store.images(job)) == ["../../outside"]


def test_images_of_finished_jobs_and_old_jobs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KEPT", 4)
    store = JobStore(tmp_path)
    first = accepted(store)
    store.update(first.id, progress=Progress(stage="learning", done=1, total=2))
    assert json.loads((tmp_path / "1/job.json").read_text())["progress"] is None
    store.update(first.id, state="done")
    assert not (tmp_path / "1/images").exists() and (tmp_path / "1/job.json").exists()
    for _ in range(4):
        store.update(store.draft().accept(kind="rollback", to=1).id, state="done")
    assert store.get(first.id) is None and len(store.all()) == 4 and not (tmp_path / "1").exists()


def test_corrupted_job_is_named(tmp_path: Path) -> None:
    accepted(JobStore(tmp_path))
    (tmp_path / "1/job.json").write_text('{"id": 1, "kind": "steal"}')
    with pytest.raises(UserError, match=r"1/job\.json is corrupted: kind"):
        JobStore(tmp_path)


def test_jobs_run_in_order_and_failures_stop_no_other(tmp_path: Path) -> None:
    store, done = JobStore(tmp_path), list[int]()
    given = [accepted(store, name) for name in ("a", "b", "c", "d")]
    store.cancel_waiting(given[2].id)
    ended: list[tuple[str, str]] = []

    def run(job: Job) -> JobChanges:
        done.append(job.id)
        if job.id == given[0].id:
            raise UserError("no room")
        if job.id == given[1].id:
            raise ZeroDivisionError("oops")
        return {"state": "done", "version": 5}

    runner = JobRunner(store, run, lambda kind, state: ended.append((kind, state)), lambda: None)
    runner.start()
    until = time.monotonic() + 10
    while store.unfinished() and time.monotonic() < until:
        time.sleep(0.01)
    runner.stop()
    runner.join()
    assert done == [1, 2, 4]
    states = [(job.state, job.error) for job in reversed(store.all())]
    assert states == [("failed", "no room"), ("failed", "ZeroDivisionError: oops"), ("cancelled", None), ("done", None)]
    assert ended == [("teach", "failed"), ("teach", "failed"), ("teach", "done")]


# Metrics, tokens, names


def test_metrics_scraped_by_prometheus_are_named_and_labeled() -> None:
    metrics = Metrics()
    metrics.requests.labels('/a"b\\', "GET", 200).inc()
    metrics.seconds.labels("/a").observe(SECONDS[3])
    metrics.seconds.labels("/a").observe(99.0)
    metrics.gauge("classes", "How many.", lambda: 2.5)
    families = {family.name: family for family in text_string_to_metric_families(metrics.text())}
    samples = {(s.name, *sorted(s.labels.items())): s.value for family in families.values() for s in family.samples}
    assert samples["probprompt_requests_total", ("method", "GET"), ("route", '/a"b\\'), ("status", "200")] == 1
    bucket, route = "probprompt_request_seconds_bucket", ("route", "/a")
    assert [samples[bucket, ("le", bound), route] for bound in ("0.025", "0.05", "+Inf")] == [0, 1, 2]
    assert samples["probprompt_request_seconds_sum", route] == 99.05 and samples["probprompt_classes",] == 2.5
    kinds = {name.removeprefix("probprompt_"): family.type for name, family in families.items()}
    counters = dict.fromkeys(("requests", "predicted_images", "unknown_images", "refused_images", "jobs"), "counter")
    assert kinds == {**counters, "request_seconds": "histogram", "batch_images": "histogram", "classes": "gauge"}
    assert families["probprompt_jobs"].documentation == "Jobs by kind and how they ended."


@pytest.mark.parametrize("token", ["short", "x" * 15, "fifteen or more but spaces", "ééééééééééééééééé"])
def test_weak_token_is_rejected(token: str) -> None:
    with pytest.raises(UserError, match="16 or more"):
        make_access("127.0.0.1", token)


def test_tokens_are_random_and_compared_whole() -> None:
    one, other = make_access("127.0.0.1", None), make_access("127.0.0.1", None)
    assert one.token != other.token and len(one.token) >= 32
    access = Access("0123456789abcdef", loopback=False)
    assert access.allows("GET", "/api/model", "0123456789abcdef")
    assert not access.allows("GET", "/api/model", "0123456789abcde") and not access.allows("GET", "/api/model", None)
    assert not access.allows("GET", "/api/model", "ü")


def test_names_are_shown_on_one_line() -> None:
    assert plain("a\x00b\u2028c\ud800 d\n") == "a b c d"
    assert plain("e\u0301") == "é"
