"""Formats of numbers, and tables as Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probprompt.report.compare import Comparison, FormattedCell, Row, Table

NOTHING = "—"
MARKED, HELD_OUT = "†", "‡"


def number(value: float, digits: int = 1) -> str:
    """Format a number with a minus sign (U+2212) and without negative zero."""
    text = f"{value:,.{digits}f}"
    return text.replace("-", "−") if float(text.replace(",", "")) else text.lstrip("-")


def percent(value: float, digits: int = 1) -> str:
    """Format a number with a percent sign."""
    return number(value, digits) + "%"


def count(number: int, thing: str) -> str:
    """Format a number of things, with the plural."""
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{number:,} {thing if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Format a time.

    >>> duration(42.2), duration(754), duration(7260)
    ('42 s', '12 min 34 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def markdown(comparison: "Comparison") -> str:
    """Write the tables with their notes in Markdown."""
    parts = ["# Comparison"]
    for table in comparison.tables():
        parts += [f"## {markdown_text(table.caption)}", table_body(table)]
        parts += ["\n".join(f"- {markdown_text(note)}" for note in table.notes)]
    return "\n\n".join(parts) + "\n"


def table_body(table: "Table") -> str:
    """Return a table in Markdown without its caption and notes."""
    single = len(table.places) == 1
    header = ["Method", *(m.heading if single else f"{p.label}: {m.heading}" for p, m in table.columns)]
    bound = {row: " (upper bound)" if row.bound else "" for row, _ in table.rows}
    body = [[markdown_text(row.label) + bound[row], *map(_markdown_cell, cells)] for row, cells in table.rows]
    return markdown_table([markdown_text(text) for text in header], body)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Write a table in Markdown: columns of text, then right-aligned numbers.

    A negative number of text columns counts from the right.

    >>> print(markdown_table(["name", "n"], [["a", "1"]]))
    | name |   n |
    | ---- | --: |
    | a    |   1 |
    """
    lines = [header, *rows]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    text = range(len(header))[:text_columns]
    rule = ["-" * width if place in text else "-" * (width - 1) + ":" for place, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        aligned = zip(cells, widths, strict=True)
        return f"| {' | '.join(c.ljust(w) if i in text else c.rjust(w) for i, (c, w) in enumerate(aligned))} |"

    return "\n".join(map(line, (header, rule, *lines[1:])))


def fill_page(page: str, comparison: "Comparison") -> str:
    """Replace the tables between two marks in a page of Markdown, or add them at its end."""
    start, end = "<!-- comparison: made by probprompt compare -->", "<!-- end of comparison -->"
    before, mark, rest = page.partition(start)
    after = rest.partition(end)[2] if mark else "\n"
    tables = markdown(comparison).partition("\n")[2].strip()
    return f"{before.rstrip() or '# Results'}\n\n{start}\n\n{tables}\n\n{end}{after}"


def markdown_text(text: str) -> str:
    """Escape a text for Markdown."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{letter}" if letter in r"\`*_[]|~" else letter for letter in " ".join(escaped.split()))


def _markdown_cell(cell: "FormattedCell") -> str:
    before, after = {1: ("**", "**"), 2: ("<ins>", "</ins>"), 0: ("", "")}[cell.rank]  # some sites reject <u>
    return f"{before}{cell.text}{after}{cell.sign}"


def latex(comparison: "Comparison") -> str:
    """Write the tables in LaTeX for booktabs."""
    head = "% needs \\usepackage{booktabs}\n"
    return head + "\n".join(_latex_table(table) for table in comparison.tables())


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", NOTHING: "---"}
_LATEX |= {MARKED: r"$^{\dagger}$", HELD_OUT: r"$^{\ddagger}$", "<": r"\textless{}", ">": r"\textgreater{}"}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def _latex_table(table: "Table") -> str:
    places = [f"\\multicolumn{{{width}}}{{c}}{{{_latex(place.label)}}}" for place, width in table.places]
    ends = accumulate((width for _, width in table.places), initial=1)
    rules = [f"\\cmidrule(lr){{{before + 1}-{end}}}" for before, end in pairwise(ends)]
    several = [f" & {' & '.join(places)} \\\\", " ".join(rules)] if len(places) > 1 else []
    headings = " & ".join(["Method", *(_latex(measure.heading) for _, measure in table.columns)])
    lines = [
        r"\begin{table}",
        r"\centering\small",
        f"\\caption{{{_latex(table.caption)}}}",
        f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        *several,
        f"{headings} \\\\",
        r"\midrule",
        *(f"{_latex_label(row)} & {' & '.join(map(_latex_cell, cells))} \\\\" for row, cells in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        f"\n\\footnotesize {' '.join(_latex(note) for note in table.notes)}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_label(row: "Row") -> str:
    return _latex(row.label) + (r" \emph{(upper bound)}" if row.bound else "")


def _latex_cell(cell: "FormattedCell") -> str:
    command = {1: r"\textbf{%s}", 2: r"\underline{%s}", 0: "%s"}[cell.rank]
    return command % _latex(cell.text) + _latex(cell.sign)


def csv_table(comparison: "Comparison") -> str:
    """Write one line per run with all its numbers and settings."""
    lines = [result.csv_line() for result in comparison.results]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()
