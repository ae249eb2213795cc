"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option

VALIDATION = 0.2  # the share of the training images that --validate holds out


class Precision(StrEnum):
    """What the backbone computes in."""

    fp32 = "fp32"
    bf16 = "bf16"


Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; the GPU where there is one by default.")]
Preset = Annotated[str | None, Option(help="published, matched, ridge or flagship.")]
Backbone = Annotated[str | None, Option(help="A named checkpoint or any timm arch.tag.")]
Weights = Annotated[str | None, Option(help="A file of weights for that architecture.")]
Tasks = Annotated[str | None, Option(help="5, or sizes 4,4,2, or a file of class lists (JSON, or a line per task).")]
TestFolder = Annotated[Path | None, Option(help="A separate test folder; else a part is held out.")]
Validate = Annotated[
    bool, Option("--validate", help="Hold out 20 % of the training images and report on them, not on test.")
]
SkipUnreadable = Annotated[
    bool, Option("--skip-unreadable", help="Go on without images that cannot be read; they are listed.")
]
Assignments = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.")]
