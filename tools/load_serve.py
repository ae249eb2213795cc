"""Load test of a served model with many clients, compared with offline prediction: one 64 px PNG per request.

    python tools/load_serve.py [MODEL] [--clients 32] [--seconds 60] [--json FILE]

Without a model a small one is taught first, with the demo backbone. The service runs in a separate
process; the clients are threads of this one and share the cores with it. On a machine that has other work to do
the two speeds cannot be compared; the processor time that an image takes can.
"""

import argparse
import http.client
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from probprompt.data import emoji_r


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--offline-seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="write the figures to a file, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model or teach(Path(scratch) / "model")
        images = drawings()
        offline = measure_offline(model, images, given.offline_seconds)
        found = {**measure_served(model, images, given.clients, given.seconds), "offline": offline}
    found["share_of_offline"] = found["images_per_s"] / offline["images_per_s"]
    found["share_by_processor_time"] = offline["cpu_ms_per_image"] / found["cpu_ms_per_image"]
    del found["output"]  # the token is in it
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def drawings() -> list[bytes]:
    """Test drawings as PNG files of 64 px."""
    pixels, rows = emoji_r.read()
    return [as_png(image) for image, row in zip(pixels, rows, strict=True) if row.split == "test"][::5]


def as_png(pixels: Any) -> bytes:
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def teach(folder: Path) -> Path:
    """A classifier of twenty classes with the demo backbone."""
    from probprompt.classifier import ContinualClassifier

    pixels, rows = emoji_r.read()
    chosen: dict[str, list[Any]] = {}
    for image, row in zip(pixels, rows, strict=True):
        if row.split == "train" and len(chosen.setdefault(row.label, [])) < 20:
            chosen[row.label].append(image)
    classifier = ContinualClassifier(backbone="demo", epochs=1)
    names = list(chosen)
    for start in range(0, len(names), 10):
        classifier.learn({name: chosen[name] for name in names[start : start + 10]})
    classifier.save(folder)
    return folder


def measure_offline(model: Path, images: list[bytes], seconds: float) -> dict[str, float]:
    """Speed and processor time of a process that predicts files in batches, as ``probprompt predict`` does."""
    from probprompt.classifier import ContinualClassifier

    classifier = ContinualClassifier.load(model)
    with tempfile.TemporaryDirectory() as scratch:
        for index, data in enumerate(images):
            (Path(scratch) / f"{index}.png").write_bytes(data)
        classifier.predict(scratch)
        begun, worked, count = time.monotonic(), time.process_time(), 0
        while time.monotonic() - begun < seconds:
            count += len(classifier.predict(scratch))
        spent = {"cpu_ms_per_image": 1000 * (time.process_time() - worked) / count}
        return {"images_per_s": count / (time.monotonic() - begun), **spent}


def measure_served(model: Path, images: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Let clients ask one after the other request, each for itself, and time every answer."""
    command = [sys.executable, "-m", "probprompt", "serve", str(model), "--port", "0"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert service.stdout is not None
        said = [service.stdout.readline()]
        place = urlsplit(said[0].split()[-1])
        times: list[float] = []
        errors: list[str] = []
        begun, worked = time.monotonic(), time.process_time() + processor_time(service.pid)
        asking = [
            threading.Thread(target=ask, args=(place.hostname, place.port, images, i, begun + seconds, times, errors))
            for i in range(clients)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        took = time.monotonic() - begun
        worked = time.process_time() + processor_time(service.pid) - worked
    finally:
        service.terminate()
        rest = service.stdout.read() if service.stdout else ""
        service.wait(60)
    quantiles = np.quantile(times, [0.5, 0.95, 0.99]) if times else [float("nan")] * 3
    return {
        "clients": clients,
        "seconds": took,
        "requests": len(times),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "images_per_s": len(times) / took,
        "cpu_ms_per_image": 1000 * worked / max(1, len(times)),  # clients and decoders among it
        "ms": {name: 1000 * float(value) for name, value in zip(("p50", "p95", "p99"), quantiles, strict=True)},
        "exit_code": service.returncode,
        "output": "".join([*said, rest]).splitlines(),
    }


def processor_time(parent: int) -> float:
    """Return the processor time of a process and its children in seconds; NaN if unknown."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if parent in (int(path.parent.name), int(fields[1])):
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total or float("nan")


def ask(
    host: str, port: int, images: list[bytes], first: int, until: float, times: list[float], errors: list[str]
) -> None:
    """One client: a request as soon as the last one is answered."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    number = first
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            connection.request("POST", "/api/predict", images[number % len(images)], {"Content-Type": "image/png"})
            answer = connection.getresponse()
            content = json.loads(answer.read())
            if answer.status != 200 or content["predictions"][0]["label"] is None:
                errors.append(f"{answer.status}: {content}")
        except (OSError, http.client.HTTPException, ValueError) as problem:
            errors.append(repr(problem))
            connection.close()
        times.append(time.monotonic() - begun)
        number += 1
    connection.close()


if __name__ == "__main__":
    main()
