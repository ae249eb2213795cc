"""The numbers that the paper prints, by table, and the runs behind them."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from probprompt.errors import UserError, suggest

Number = tuple[float] | tuple[float, float]
"""A mean, with a standard deviation if one is printed."""
PRESET = "published"
METHODS = (
    *("joint", "ft", "ft++", "l2p", "l2p++", "deep-l2p++", "dual-prompt", "coda-prompt", "hide-prompt"),
    *("evo-prompt", "apt", "vq-prompt", "probprompt"),
)
"""Methods of the paper's tables, and the original L2P."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(_Part):
    """A benchmark with a number of tasks, on one backbone."""

    key: str
    heading: str
    benchmark: str
    tasks: int
    backbone: str  # named weights, see :mod:`probprompt.backbones.pretrained`
    seeds: tuple[int, ...]
    family: str = ""
    """Kind of pretraining if its runs belong to this column only."""


class Row(_Part):
    """A method, or one setting of ProbPrompt, with its printed numbers by column and measure."""

    label: str
    line: int  # of the paper's source
    method: str = "probprompt"
    settings: dict[str, Any] = {}
    """Settings of the row that differ from the preset, by dotted names."""
    protocol: dict[str, Any] = {}
    """Further settings of the runs behind the number; ``none`` is TOML for ``None``."""
    words: str = ""  # in place of numbers
    printed: dict[str, dict[str, Number]]
    costs: dict[str, float] = {}

    @field_validator("protocol")
    @classmethod
    def _read_none(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {name: None if part == "none" else part for name, part in value.items()}

    @property
    def all_settings(self) -> dict[str, Any]:
        """Settings behind the paper's number that differ from the preset."""
        return self.settings | self.protocol


class Table(_Part):
    """A table of the paper."""

    name: str
    number: int
    label: str  # in the paper's source
    title: str
    first: str = "Method"  # heading of the first column
    study: bool = False
    """Whether its rows are settings of ProbPrompt, which can be studied on any benchmark."""
    runs: int = 0  # behind each number with a standard deviation; 0 if unknown
    measures: tuple[str, ...]
    costs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    columns: tuple[Column, ...] = Field(min_length=1)
    rows: tuple[Row, ...] = Field(min_length=1)

    @property
    def heading(self) -> str:
        """Number and title."""
        return f"Table {self.number}. {self.title}"

    @property
    def backbones(self) -> dict[str, None]:
        """Named weights of its columns in order."""
        return dict.fromkeys(column.backbone for column in self.columns)

    def seeds(self, row: Row, column: Column) -> tuple[int, ...]:
        """Return the seeds of a number: one if only others have a standard deviation."""
        numbers = [value for each, where in self.cells() for value in each.printed[where.key].values()]
        single = len(row.printed[column.key].get("FAA", ())) == 1 and any(len(value) == 2 for value in numbers)
        return column.seeds[:1] if single else column.seeds

    def cells(self) -> list[tuple[Row, Column]]:
        """Return the rows and columns with a printed number."""
        return [(row, column) for row in self.rows for column in self.columns if column.key in row.printed]


class Experiment(NamedTuple):
    """A benchmark with its numbers of tasks and images."""

    benchmark: str
    heading: str
    tasks: int
    training: int
    test: int


EXPERIMENTS = (
    Experiment("cifar100", "CIFAR-100, 10 tasks", 10, 50_000, 10_000),
    *(Experiment("imagenet-r", f"ImageNet-R, {tasks}", tasks, 24_000, 6_000) for tasks in (5, 10, 20)),
    Experiment("cub200", "CUB-200, 10", 10, 5_994, 5_794),
)


@cache
def tables() -> tuple[Table, ...]:
    """Read all tables of the paper in order."""
    content = tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))
    for row in (row for table in content["table"] for row in table["rows"] if "protocol" in row):
        row["protocol"] = content["protocol"][row["protocol"]]
    return tuple(Table.model_validate(entry) for entry in content["table"])


def find(name: str) -> Table:
    """Return a table by its name."""
    known = {table.name: table for table in tables()}
    if name not in known:
        raise UserError(f"Unknown table of the paper {name!r}. {suggest(name, known)}")
    return known[name]
