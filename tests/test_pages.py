"""Every block of code in the docs and the README: executed, or, where that cannot be done here, at least parsed.

Blocks of a page are executed in their order in one empty folder: python in one namespace, bash by bash with
`probprompt` on the PATH. A block that cannot be executed in a test carries the reason in the source, on the line
before it: `<!-- parsed only: needs eight GPUs -->`. Then its python must compile, its bash must be valid, and every
`probprompt` in it must be a command with options that exist, settings that exist and names that exist.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from markdown_it import MarkdownIt

from probprompt import methods, presets
from probprompt.cli.app import app
from probprompt.config import apply_assignments
from probprompt.data import benchmarks
from probprompt.errors import UserError
from probprompt.methods import base

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
PAGES += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "results").glob("*.md"))]  # part of the site
SHOWN = {"text", "json", "toml"}  # languages of what is only shown
OTHER_COMMANDS = {
    "pip",
    "make",
    "ray",
    "torchrun",
    "export",
    "cat",
    "if",
    "then",
    "else",
    "fi",
    "[",
    "mkdir",
    "curl",
    "python",
}
_MARK = re.compile(r"<!-- parsed only: (.{5,}) -->")
_SEPARATORS = {"&&", "||", ";", "|", "&"}
_OPENING = {"if", "then", "else"}
REFUSED = typer.BadParameter.__mro__[1]
"""What the parser raises: a wrong option, value or command."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    line: int
    language: str
    code: str
    parsed_only: bool

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}, line {self.line}"


def read_blocks(page: str) -> list[Block]:
    """All blocks of a page; indented ones have no language and are refused elsewhere."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines, blocks = text.splitlines(), []
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block") and token.map:
            first = token.map[0]
            before = next((line for line in reversed(lines[:first]) if line.strip()), "")
            language = token.info.strip() if token.type == "fence" else "indented"
            marked = bool(_MARK.fullmatch(before.strip()))
            blocks.append(Block(page, first + 1, language, token.content, marked))
    return blocks


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


# What is not executed


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.parsed_only or b.language in SHOWN], ids=lambda b: b.where)
def test_what_is_not_executed_is_at_least_valid(block: Block) -> None:
    if block.language == "python":
        compile(block.code, block.where, "exec")
    elif block.language == "bash":
        check_shell(block.code)
    elif block.language == "json":
        json.loads(block.code)
    elif block.language == "toml":
        tomllib.loads(block.code)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    known = {"python", "bash", *SHOWN}
    strange = [f"{block.where}: {block.language or 'no language'}" for block in read_blocks(page)]
    assert not [told for told, block in zip(strange, read_blocks(page), strict=True) if block.language not in known]


def check_shell(code: str) -> None:
    """Refuse bash that is not valid, programs that nobody knows, and commands of ours that would be refused."""
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in commands(code):
        if words[0] == "probprompt":
            check_command(words[1:])
        elif words[0] == "torchrun" and "-m" in words:
            module, *rest = words[words.index("-m") + 1 :]
            assert module == "probprompt"
            check_command(rest)
        else:
            check_other(words)


def commands(code: str) -> Iterator[list[str]]:
    """The simple commands of a script, as words; variables count as 1."""
    ended = re.sub(r"<<'?(\w+)'?.*?^\1$", "", code, flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ")
    for line in ended.splitlines():
        words: list[str] = []
        lexer = shlex.shlex(re.sub(r"\$\{?\w+\}?", "1", line), posix=True, punctuation_chars=";|&")
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if word not in _SEPARATORS:
                words.append(word)
            elif words:
                yield from _simple(words)
                words = []


def _simple(words: Sequence[str]) -> Iterator[list[str]]:
    """Without assignments before the command and words that only open a part of a script."""
    rest = list(words)
    while rest and (re.fullmatch(r"\w+=.*", rest[0]) or rest[0] in _OPENING):
        rest.pop(0)
    if rest:
        yield rest


def check_other(words: Sequence[str]) -> None:
    """Commands that are not ours: known ones, with extras and targets that exist."""
    assert words[0] in OTHER_COMMANDS, f"{words[0]!r} is no command that pages may use"
    if words[0] == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", targets, re.MULTILINE) for target in words[1:])
    if words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        asked = {name for word in words for found in re.findall(r"\[(.*?)\]", word) for name in found.split(",")}
        assert asked <= set(extras), f"no such extra: {asked - set(extras)}"


def check_command(arguments: Sequence[str]) -> None:
    """Parse a command as the program does, without running it; then look up what it names."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("probprompt", list(arguments))
    while hasattr(command, "commands") and (rest := [*context._protected_args, *context.args]):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    values = context.params
    names = [name for key in ("method", "methods") for name in _listed(values.get(key))]
    for name in names:
        assert name == "all" or methods.find(name)
    for preset in (name for key in ("preset", "presets") for name in _listed(values.get(key))):
        assert preset in (*presets.NAMES, "custom"), preset
    benchmark = values.get("benchmark")
    assert not benchmark or "/" in benchmark or benchmark in benchmarks.registered(), benchmark
    method = {"method": {"name": names[0]}} if len(names) == 1 and names != ["all"] else {}
    apply_assignments(method, values.get("assignments") or [])


def _listed(value: object) -> list[str]:
    texts = value if isinstance(value, list | tuple) else [value] if isinstance(value, str) else []
    return [part for text in texts for part in str(text).split(",")]


@pytest.mark.parametrize(
    "line",
    [
        "probprompt train cifar100 --presett published",
        "probprompt trian cifar100",
        "probprompt train cifar1000",
        "probprompt train cifar100 --preset publishd",
        "probprompt train photos/ --set trainig.epochs=3",
        "probprompt book ad runs/a",
        "probprompt reproduce table9",
        "torchrun --nproc-per-node 8 -m probprompt train cifar100 --gpu 8",
        "probpromt train cifar100",
        "pip install 'probprompt[rays]'",
        "make demos",
        "if true; then probprompt train --resum runs/a; fi",
        "OUT=1 probprompt report",
        "probprompt train cifar100 | probprompt predict-nothing",
        "probprompt train 'cifar100",
    ],
)
def test_a_wrong_line_is_found(line: str) -> None:
    with pytest.raises((AssertionError, UserError, REFUSED)):
        check_shell(line)


# What is executed


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the program `probprompt`, which answers quickly."""
    folder = Path(tmp_path_factory.mktemp("bin"))
    server = subprocess.Popen([sys.executable, str(ROOT / "tests" / "command_server.py"), str(folder / "socket")])
    try:
        while not (folder / "ready").exists():
            assert server.poll() is None, "the command server did not start"
            time.sleep(0.05)
        yield folder
    finally:
        server.terminate()
        server.wait()


def _executed(page: str) -> list[Block]:
    return [block for block in read_blocks(page) if not block.parsed_only and block.language in ("python", "bash")]


@pytest.mark.parametrize("page", [page for page in PAGES if _executed(page)])
def test_what_a_page_says_works_as_pasted(
    page: str, tmp_path: Path, command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{command}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PROBPROMPT_CACHE", str(tmp_path / ".cache"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in _executed(page):
        if block.language == "python":
            exec(compile(block.code, block.where, "exec"), namespace)
        else:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.code], capture_output=True, text=True)
            assert done.returncode == 0, f"{block.where}:\n{done.stdout}\n{done.stderr}"
