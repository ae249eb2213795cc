"""Which runs had company: their times say little about speed.

Only runs whose records are at hand can be seen, so that one without company among them need not have been alone.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

ROUNDING_S = 2.0
"""Seconds by which one run may seem to begin before another has ended, though it does not."""
SHARE = 0.1
"""Of a run's time, what others may take part in."""

_CHIPS = ("machine", "processor", "cores", "gpu")
"""What machines are told apart by, whatever a run does with its own."""

Record = Mapping[str, Any]


def had_company(records: Sequence[Record], others: Sequence[Record] = ()) -> list[bool]:
    """For each record whether other runs, of these or others, ran at the same time on a machine just like its own.

    >>> gpu, at = {"gpu": "H200"}, "2026-03-14T09:00:{}+00:00"
    >>> made = [{"created": at.format(s), "hardware": gpu, "time": {"total_s": 20}} for s in ("00", "10", "30")]
    >>> had_company(made)
    [True, True, False]
    """
    spans = [_span(record) for record in records]
    every = list(zip([*records, *others], [*spans, *map(_span, others)], strict=True))
    return [span is not None and _met(record, span, every) for record, span in zip(records, spans, strict=True)]


def _met(record: Record, span: tuple[float, float], every: Sequence[tuple[Record, tuple[float, float] | None]]) -> bool:
    begun, ended = span
    shared = sum(
        max(0.0, min(ended, other[1]) - max(begun, other[0]))
        for one, other in every
        if other and one is not record and _chips(one) == _chips(record)
    )
    return shared > max(ROUNDING_S, SHARE * (ended - begun))


def _chips(record: Record) -> list[object]:
    return [record["hardware"].get(name) for name in _CHIPS]


def _span(record: Record) -> tuple[float, float] | None:
    """From when until when it ran, in seconds; None where it does not say when, how long or on what."""
    spent = record.get("time") or {}
    try:
        loaded = datetime.fromisoformat(str(record["created"])).timestamp()  # a record is begun once images are there
        start = loaded - float(spent.get("loading_s") or 0.0)
        return (start, start + float(spent["total_s"])) if record.get("hardware") else None
    except (KeyError, TypeError, ValueError):
        return None
