"""The report of runs: one HTML file to read, keep and send, and one picture of the essentials."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["save_overview", "write_report"]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained HTML page on the given run folders and return its path.

    One run gets a separate page; several finished runs are compared, as by ``compare``.
    """
    from probprompt.report import pages  # drawing and templates load only when a page is asked for

    return pages.write_report(runs, out)


def save_overview(runs: Sequence[Path], out: Path) -> Path:
    """Save one wide picture (PNG or SVG, by the name) of the essentials of the given runs.

    It shows the average accuracy of all runs, and the accuracy matrix and the prompt similarity of the first.
    """
    from probprompt.report import pages

    return pages.save_overview(runs, out)
