"""Counts and times of the service, in the text that Prometheus reads."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)
Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number that only grows, one for each set of labels."""

    kind = "counter"

    def __init__(self) -> None:
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Let the number of these labels grow."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def value(self, **labels: str) -> float:
        """The number of these labels."""
        return self._values.get(tuple(sorted(labels.items())), 0.0)

    def lines(self, name: str) -> list[str]:
        """The lines of the text."""
        with self._lock:
            return [f"{name}{_braces(key)} {_number(value)}" for key, value in sorted(self._values.items())]


class Gauge:
    """A number that is looked up when somebody asks."""

    kind = "gauge"

    def __init__(self, look: Callable[[], float]) -> None:
        self._look = look

    def lines(self, name: str) -> list[str]:
        """The lines of the text."""
        return [f"{name} {_number(self._look())}"]


class Histogram:
    """How often values fell below each of some bounds."""

    kind = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def observe(self, value: float, **labels: str) -> None:
        """Count one value."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
            counts[bisect_left(self._bounds, value)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value

    def lines(self, name: str) -> list[str]:
        """The lines of the text: a bucket holds everything up to its bound."""
        written = []
        with self._lock:
            for key, counts in sorted(self._counts.items()):
                total = 0
                for bound, count in zip((*map(_number, self._bounds), "+Inf"), counts, strict=True):
                    total += count
                    written.append(f"{name}_bucket{_braces((*key, ('le', bound)))} {total}")
                written += [
                    f"{name}_sum{_braces(key)} {_number(self._sums[key])}",
                    f"{name}_count{_braces(key)} {total}",
                ]
        return written


Kind = TypeVar("Kind", Counter, Gauge, Histogram)


class Metrics:
    """All that the service counts."""

    def __init__(self) -> None:
        self._all: dict[str, tuple[str, Counter | Gauge | Histogram]] = {}
        self.requests = self._add("requests_total", "Requests by route, method and status.", Counter())
        self.seconds = self._add("request_seconds", "Time from a request to its answer.", Histogram(SECONDS))
        self.images = self._add("predicted_images_total", "Images that were classified.", Counter())
        self.unknown = self._add("unknown_images_total", "Images found to be of no known class.", Counter())
        self.refused = self._add("refused_images_total", "Uploads that could not be decoded.", Counter())
        self.batches = self._add("batch_images", "Images that were classified together.", Histogram(SIZES))
        self.jobs = self._add("jobs_total", "Jobs by kind and how they ended.", Counter())

    def _add(self, name: str, about: str, metric: Kind) -> Kind:
        self._all[f"probprompt_{name}"] = (about, metric)
        return metric

    def gauge(self, name: str, about: str, look: Callable[[], float]) -> None:
        """Add a number that is looked up when somebody asks."""
        self._add(name, about, Gauge(look))

    def text(self) -> str:
        """Everything in Prometheus's text format."""
        written = []
        for name, (about, metric) in self._all.items():
            written += [f"# HELP {name} {about}", f"# TYPE {name} {metric.kind}", *metric.lines(name)]
        return "\n".join(written) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _braces(labels: Labels) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels) + "}" if labels else ""
