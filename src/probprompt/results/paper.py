"""What the paper prints, table by table, and which runs of ours each number is about."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from probprompt.errors import UserError, suggest

Number = tuple[float] | tuple[float, float]
"""A mean, with a standard deviation where one is printed."""

PROMPTED = "probprompt"
PRESET = "published"
"""How each method is run in the paper's tables."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(_Part):
    """A benchmark in so many tasks, on one backbone."""

    key: str
    heading: str
    benchmark: str
    tasks: int
    backbone: str
    """The named weights, as :mod:`probprompt.checkpoints` has them."""
    seeds: tuple[int, ...]
    family: str = ""
    """Where it is about a way of pretraining: the runs that belong here and not into other tables."""


class Row(_Part):
    """A method, or one setting of ProbPrompt, with its printed numbers by column and measure."""

    label: str
    line: int
    """Of the paper's source: where the row begins."""
    method: str = PROMPTED
    settings: dict[str, Any] = {}
    """What the row is about: what differs from the preset, by dotted names."""
    protocol: dict[str, Any] = {}
    """How the runs behind the paper's number differ from the preset beyond that: others than its authors may have run
    the method. ``none`` is what TOML has no word for."""
    words: str = ""
    """What is printed in place of numbers."""
    printed: dict[str, dict[str, Number]]
    costs: dict[str, float] = {}

    @field_validator("protocol")
    @classmethod
    def _nothing(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {name: None if part == "none" else part for name, part in value.items()}

    @property
    def as_run(self) -> dict[str, Any]:
        """All that the runs behind the paper's number have set otherwise than the preset."""
        return self.settings | self.protocol


class Table(_Part):
    """A table of the paper."""

    name: str
    number: int
    label: str
    """Of the paper's source."""
    title: str
    first: str = "Method"
    """What its first column is about."""
    study: bool = False
    """Whether its rows are settings of ProbPrompt, which can be studied on any benchmark."""
    runs: int = 0
    """Behind each number with a deviation; 0 where the paper does not say."""
    measures: tuple[str, ...]
    costs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    columns: tuple[Column, ...] = Field(min_length=1)
    rows: tuple[Row, ...] = Field(min_length=1)

    @property
    def heading(self) -> str:
        """Its number and what it is about."""
        return f"Table {self.number}. {self.title}"

    def seeds(self, row: Row, column: Column) -> tuple[int, ...]:
        """The seeds of a number; one alone where the paper prints it without a deviation beside others with one."""
        numbers = [value for each, where in self.cells() for value in each.printed[where.key].values()]
        final = row.printed[column.key].get("FAA", ())
        alone = len(final) == 1 and any(len(value) == 2 for value in numbers)
        return column.seeds[:1] if alone else column.seeds

    def cells(self) -> list[tuple[Row, Column]]:
        """Where the paper prints something."""
        return [(row, column) for row in self.rows for column in self.columns if column.key in row.printed]


@cache
def tables() -> tuple[Table, ...]:
    """All tables of the paper, in its order."""
    content = tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))
    for row in (row for table in content["table"] for row in table["rows"] if "protocol" in row):
        row["protocol"] = content["protocol"][row["protocol"]]
    return tuple(Table.model_validate(entry) for entry in content["table"])


def find(name: str) -> Table:
    """A table by its name."""
    known = {table.name: table for table in tables()}
    if name not in known:
        raise UserError(f"no table of the paper is called {name!r}: {suggest(name, known)}")
    return known[name]
