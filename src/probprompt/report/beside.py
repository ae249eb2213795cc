"""Which runs had company: their times say little about speed."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

ROUNDING_S = 2.0
"""Seconds by which one run may seem to begin before another has ended, though it does not."""
SHARE = 0.1
"""Of a run's time, what others may take part in."""

Record = Mapping[str, Any]


def had_company(records: Sequence[Record], others: Sequence[Record] = ()) -> list[bool]:
    """For each record whether other runs, of these or others, ran at the same time on a machine just like its own.

    >>> machine, at = {"gpu": "H200"}, "2026-03-14T09:00:{}+00:00"
    >>> made = [{"created": at.format(s), "hardware": machine, "time": {"total_s": 20}} for s in ("00", "10", "30")]
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
        if other and one is not record and one["hardware"] == record["hardware"]
    )
    return shared > max(ROUNDING_S, SHARE * (ended - begun))


def _span(record: Record) -> tuple[float, float] | None:
    """From when until when it ran, in seconds; None where it does not say when, how long or on what."""
    begun, took = record.get("created"), (record.get("time") or {}).get("total_s")
    if not begun or not took or not record.get("hardware"):
        return None
    start = datetime.fromisoformat(str(begun)).timestamp()
    return start, start + float(took)
