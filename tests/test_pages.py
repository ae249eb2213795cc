"""Every block of code in the docs and the README: executed, or, where that cannot be done here, at least parsed.

Blocks of a page are executed in their order in one empty folder: python in one namespace, bash by bash with
`probprompt` on the PATH. The line before a block may say what is put in the place of something that a small machine
cannot have, and what lies ready (page_marks.py), or why it cannot be executed at all. Then its python must compile, its
bash must be valid, and every `probprompt` in it must be a command with options, settings and names that exist. What a
page promises beyond that its blocks run is looked up by page_checks.py.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

import pytest
import typer

from page_checks import CHECKS
from page_marks import ROOT, Block, WrongMarkError, read_blocks
from page_world import GIVEN, World
from probprompt import methods, presets
from probprompt.cli import app
from probprompt.config import apply_assignments
from probprompt.data import datasets
from probprompt.errors import UserError
from probprompt.methods import base
from reproduction import paper
from reproduction.__main__ import app as reproduction_app

PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
PAGES += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "results").glob("*.md"))]  # part of the site
SHOWN = {"text", "json", "toml"}  # languages of what is only shown
OTHER_COMMANDS = {"pip", "make", "ray", "torchrun", "export", "cat", "mkdir", "curl", "python"}
OTHER_COMMANDS |= {"if", "then", "else", "fi", "["}
_SEPARATORS = {"&&", "||", ";", "|", "&"}
_OPENING = {"if", "then", "else"}
LONGEST_SECONDS = 300
REFUSED = typer.BadParameter.__mro__[1]
"""What the parser raises: a wrong option, value or command."""


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


# What is not executed


@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.executed_here or b.mark.swaps], ids=lambda b: b.where)
def test_what_is_not_executed_as_it_stands_is_at_least_valid(block: Block) -> None:
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
        elif words[:3] == ["python", "-m", "reproduction"]:
            check_command(words[3:], reproduction_app)
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
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        asked = {name for word in words for found in re.findall(r"\[(.*?)\]", word) for name in found.split(",")}
        missing = asked - set(project["optional-dependencies"])
        assert not missing, f"no such extra: {missing}"


def check_command(arguments: Sequence[str], app: typer.Typer = app) -> None:
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
    assert "table" not in values or paper.find(values["table"])
    benchmark = values.get("benchmark")
    assert not benchmark or "/" in benchmark or benchmark in datasets.registered(), benchmark
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
        "python -m reproduction results ad runs/a",
        "python -m reproduction run table9",
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


# What other tests execute


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark.elsewhere], ids=lambda b: b.where)
def test_what_another_test_executes_is_named_there(block: Block) -> None:
    text = (ROOT / block.mark.elsewhere).read_text(encoding="utf-8")
    parts = Path(block.page).parts
    assert block.page in text or " / ".join(f'"{part}"' for part in parts) in text, f"{block.mark.elsewhere}: no page"


# Marks


@pytest.mark.parametrize(
    ("mark", "code"),
    [
        ('executed with: "8" as "2"', "run 2 2\n"),
        ('executed with: "run 8" as "walk", "8" as "2"', "walk 2\n"),  # the longest first
        ('executed with: "run" as "8", "8" as "run"', "8 run run\n"),  # and all at once
        ('executed given: photos, inbox; with: "8 8" as "\\"a; b\\""', 'run "a; b"\n'),
        ("executed in: elsewhere; twice", "run 8 8\n"),
        ('executed until:\n   "stop; now"', "run 8 8\n"),
    ],
)
def test_a_mark_says_what_is_executed(mark: str, code: str) -> None:
    (block,) = read_blocks("page.md", f"Text\n\n<!-- {mark} -->\n\n```bash\nrun 8 8\n```\n")
    assert block.replaced == code and block.executed_here
    assert block.mark.twice == ("twice" in mark)
    assert block.mark.folder == ("elsewhere" if "in: " in mark else "")
    assert block.mark.given == (("photos", "inbox") if "given" in mark else ())
    assert block.mark.until == ("stop; now" if "until" in mark else "")


@pytest.mark.parametrize(
    "text",
    [
        '<!-- executed with: "9" as "2" -->\n```bash\nrun 8\n```',  # nothing to replace
        '<!-- executed with: "8" as "8" -->\n```bash\nrun 8\n```',
        '<!-- executed with: "8" as "2", "8" as "3" -->\n```bash\nrun 8\n```',
        '<!-- executed with: "8" as 2 -->\n```bash\nrun 8\n```',
        '<!-- executed with: "8" as "2" "9" as "3" -->\n```bash\nrun 8\n```',
        "<!-- executed twice; twice -->\n```bash\nrun 8\n```",
        "<!-- executed quickly -->\n```bash\nrun 8\n```",
        "<!-- executed given: -->\n```bash\nrun 8\n```",
        "<!-- executed in: ../other -->\n```bash\nrun 8\n```",
        "<!-- executed by hand -->\n```bash\nrun 8\n```",
        "<!-- parsed only -->\n```bash\nrun 8\n```",
        "<!-- parsed only: needs a GPU -->\nText\n```bash\nrun 8\n```",  # stands before no block
        "<!-- executed twice -->\n",
    ],
)
def test_a_wrong_mark_is_refused(text: str) -> None:
    with pytest.raises(WrongMarkError):
        assert [block.replaced for block in read_blocks("page.md", f"Text\n\n{text}\n")]


def test_what_can_be_given_and_looked_up_is_what_pages_ask_for() -> None:
    assert {name for block in BLOCKS for name in block.mark.given} == set(GIVEN)
    assert set(CHECKS) <= {block.page for block in BLOCKS if block.executed_here}


# What is executed


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the program `probprompt`, which answers quickly."""
    folder = Path(tmp_path_factory.mktemp("bin"))
    asked = [sys.executable, str(ROOT / "tests" / "command_server.py"), str(folder / "socket")]
    server = subprocess.Popen(asked, env={**os.environ, **alone(folder)})
    try:
        while not (folder / "ready").exists():
            assert server.poll() is None, "the command server did not start"
            time.sleep(0.05)
        yield folder
    finally:
        server.terminate()
        server.wait()


def alone(folder: Path) -> dict[str, str]:
    """An environment in which the hub's client has nothing of the user's."""
    return {"HF_HOME": str(folder / ".hub"), "HF_HUB_DISABLE_XET": "1"}


def _executed(page: str) -> list[Block]:
    return [block for block in read_blocks(page) if block.executed_here]


@pytest.mark.parametrize("page", [page for page in PAGES if _executed(page)])
def test_what_a_page_says_works_as_pasted(
    page: str, tmp_path: Path, command: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    programs = (str(command), str(Path(sys.executable).parent), os.environ["PATH"])
    own = {"PROBPROMPT_CACHE": str(tmp_path / ".cache"), "PROBPROMPT_DATA": str(tmp_path / "data"), **alone(tmp_path)}
    for name, value in {"PATH": os.pathsep.join(programs), "OMP_NUM_THREADS": "1", **own}.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    with ExitStack() as closing:
        world = World(lambda: request.getfixturevalue("small_model"), monkeypatch, closing)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for block in _executed(page):
            folder = tmp_path / block.mark.folder
            folder.mkdir(exist_ok=True)
            monkeypatch.chdir(folder)
            for name in block.mark.given:
                world.prepare(name, folder)
            for _ in range(1 + block.mark.twice):
                if block.language == "python":
                    exec(compile(block.replaced, block.where, "exec"), namespace)
                else:
                    said.append(run_shell(block))
    if page in CHECKS:
        CHECKS[page](tmp_path, said)


def run_shell(block: Block) -> str:
    """Execute a block by bash, and give back what it said."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as told:
        words = ["bash", "-euo", "pipefail", "-c", block.replaced]
        process = subprocess.Popen(words, stdout=told, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if block.mark.until:
                visit(wait_for(block.mark.until, told, process))
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
            code = process.wait(LONGEST_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it left running
            process.wait()
        said = read_again(told)
    assert code == 0, f"{block.where}:\n{said}"
    return said


def read_again(told: IO[str]) -> str:
    told.seek(0)
    return told.read()


def wait_for(text: str, told: IO[str], process: subprocess.Popen[bytes]) -> str:
    """What a program that goes on has said, once that holds this text."""
    until = time.monotonic() + LONGEST_SECONDS
    while text not in (said := read_again(told)):
        assert process.poll() is None and time.monotonic() < until, f"never said {text!r}:\n{said}"
        time.sleep(0.05)
    return said


def visit(said: str) -> None:
    """Look at the page whose address a service has told."""
    (address,) = re.findall(r"serving \S+ at (http://127\.0\.0\.1:\d+)", said)
    with urlopen(address, timeout=30) as page:
        assert page.status == 200 and b"<html" in page.read()
