"""Blocks of code in pages, and the marks that say how the tests execute them.

A block is executed as it stands, unless the comment right before it says otherwise. It is one of:

    <!-- parsed only: needs several machines -->
    <!-- executed by tests/test_serve.py -->
    <!-- executed with: "cifar100" as "photos", "--gpus 8" as "--gpus 2"; given: photos -->

The last has clauses, with semicolons between, each at most once and in any order:

    with: "OLD" as "NEW", ...   what is put in the place of what a small machine cannot have; all else is literal
    given: NAME, ...            what lies ready (see page_world.py)
    in: FOLDER                  a folder of its own, so that nothing is there but what is given
    until: "TEXT"               it runs until it is stopped: once it says this it is visited, and sent Ctrl-C
    twice                       once more, as a job that is queued again

OLD, NEW and TEXT are written as JSON does. Each OLD must stand in the block, and is replaced wherever it does.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_STRING = r'"(?:[^"\\]|\\.)*"'
_CLAUSE = re.compile(rf"(?:{_STRING}|[^;\"])+")
_SWAP = re.compile(rf"({_STRING}) as ({_STRING})")
_KINDS = ("executed", "parsed only")


class WrongMarkError(ValueError):
    """A mark that says nothing, or something that does not fit its block."""


@dataclass(frozen=True)
class Mark:
    """How the tests execute a block: as it stands, unless something is set."""

    parsed_only: str = ""
    """Why it cannot be executed."""
    elsewhere: str = ""
    """The test file that executes it."""
    swaps: dict[str, str] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    folder: str = ""
    until: str = ""
    twice: bool = False


def parse_mark(text: str) -> Mark:
    """What the comment before a block says."""
    said = re.sub(r"\s*\n\s*", " ", text).strip()
    if found := re.fullmatch(r"parsed only: (.{5,})", said):
        return Mark(parsed_only=found[1])
    if found := re.fullmatch(r"executed by (tests/test_\w+\.py)", said):
        return Mark(elsewhere=found[1])
    if not (found := re.fullmatch(r"executed (.+)", said)):
        raise WrongMarkError(f"not understood: {said}")
    values: dict[str, object] = {}
    for clause in _clauses(found[1]):
        name, value = _read_clause(clause)
        if name in values:
            raise WrongMarkError(f"twice the same clause: {clause}")
        values[name] = value
    return Mark(**values)  # type: ignore[arg-type]


def _clauses(text: str) -> list[str]:
    parts = [part.strip() for part in _CLAUSE.findall(text)]
    if "; ".join(parts) != text:
        raise WrongMarkError(f"not understood: {text}")
    return parts


def _read_clause(clause: str) -> tuple[str, object]:
    name, _, value = clause.partition(": ")
    if clause == "twice":
        return "twice", True
    if name == "with":
        return "swaps", _read_swaps(value)
    if name == "given" and re.fullmatch(r"[\w./-]+(, [\w./-]+)*", value):
        return "given", tuple(value.split(", "))
    if name == "in" and re.fullmatch(r"[\w-]+", value):
        return "folder", value
    if name == "until" and re.fullmatch(_STRING, value):
        return "until", json.loads(value)
    raise WrongMarkError(f"not understood: {clause}")


def _read_swaps(text: str) -> dict[str, str]:
    pairs = _SWAP.findall(text)
    if not pairs or ", ".join(f"{old} as {new}" for old, new in pairs) != text:
        raise WrongMarkError(f"not understood: {text}")
    swaps = {json.loads(old): json.loads(new) for old, new in pairs}
    if len(swaps) < len(pairs) or any(not old or old == new for old, new in swaps.items()):
        raise WrongMarkError(f"replaces nothing, or the same twice: {text}")
    return swaps


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    line: int
    language: str
    code: str
    mark: Mark

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}, line {self.line}"

    @property
    def executed_here(self) -> bool:
        """Whether it is to be run with its page."""
        return self.language in ("python", "bash") and not (self.mark.parsed_only or self.mark.elsewhere)

    @property
    def replaced(self) -> str:
        """Its code with what its mark puts in the place of something, all at once; the longest text goes first."""
        swaps, met = self.mark.swaps, set[str]()
        if not swaps:
            return self.code

        def swap(found: re.Match[str]) -> str:
            met.add(found[0])
            return swaps[found[0]]

        made = re.sub("|".join(map(re.escape, sorted(swaps, key=len, reverse=True))), swap, self.code)
        if missing := swaps.keys() - met:
            raise WrongMarkError(f"{self.where}: the block does not hold {sorted(missing)}")
        return made


def read_blocks(page: str, text: str | None = None) -> list[Block]:
    """All blocks of a page, each with its mark; one that stands before no block is refused."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    marks = _marks_by_end(text)
    blocks = []
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block") and token.map:
            language = token.info.strip() if token.type == "fence" else "indented"
            blocks.append(Block(page, token.map[0] + 1, language, token.content, marks.pop(token.map[0], Mark())))
    if marks:
        raise WrongMarkError(f"{page}: a mark before line {min(marks) + 1} stands before no block of code")
    return blocks


def _marks_by_end(text: str) -> dict[int, Mark]:
    """Marks by the number, from 0, of the next line that is not empty; what code shows of comments is none."""
    lines, found = text.splitlines(), dict[int, Mark]()
    for token in MarkdownIt().parse(text):
        if token.type == "html_block" and token.map and (comment := _COMMENT.match(token.content)):
            if not comment[1].strip().startswith(_KINDS):
                continue
            after = token.map[0] + comment[0].count("\n") + 1
            while after < len(lines) and not lines[after].strip():
                after += 1
            found[after] = parse_mark(comment[1])
    return found
