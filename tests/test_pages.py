"""Every block of code in the README and the docs: executed, or at least parsed where a test cannot run it.

The blocks of a page run in order in one empty folder: Python in one namespace, shell by bash with `probprompt` on the
PATH. `PLANS` in page_world.py lists what a page needs, what is replaced on a small machine, and what is only parsed:
then Python must compile, and commands must exist with their options, settings and names. A `text` block right after a
Python block is its output. page_checks.py checks what a page promises beyond that its blocks run.
"""

import io
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
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

import pytest
import typer

from page_checks import CHECKS
from page_world import GIVEN, PLANS, ROOT, Block, World, read_blocks
from probprompt import methods, presets
from probprompt.cli import app
from probprompt.config import apply_assignments
from probprompt.data import datasets
from probprompt.errors import UserError
from probprompt.methods import base
from reproduction import paper
from reproduction.__main__ import app as reproduction_app

PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
RESULTS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "results").glob("*.md"))]
SERVE, STARTED = "probprompt serve", "Ctrl-C"
"""A command that runs until it is stopped, and the part of its output that shows that it has started."""
OTHER_COMMANDS = {"pip", "make", "ray", "torchrun", "export", "cat", "mkdir", "curl", "python", "true"}
OTHER_COMMANDS |= {"if", "then", "else", "fi", "["}
_SEPARATORS = {"&&", "||", ";", "|", "&"}
_OPENING = {"if", "then", "else"}
LONGEST_SECONDS = 300
REJECTED = typer.BadParameter.__mro__[1]
"""Base class of what the parser raises: a wrong option, value or command."""


# Parsing


@pytest.mark.parametrize("block", [block for page in [*PAGES, *RESULTS] for block in read_blocks(page)], ids=str)
def test_every_block_is_valid(block: Block) -> None:
    if block.language == "python":
        compile(block.code, str(block), "exec")
    elif block.language == "bash":
        check_shell(block.code)
    elif block.language == "json":
        json.loads(block.code)
    elif block.language == "toml":
        tomllib.loads(block.code)
    else:
        assert block.language in ("text", "http"), f"{block}: {block.language or 'no language'}"


def check_shell(code: str) -> None:
    """Check that bash accepts the code, that programs are known, and that our commands would run."""
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
    """Yield the simple commands of a script, as words; variables count as 1."""
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
    """Remove assignments before the command and words that only open a part of a script."""
    rest = list(words)
    while rest and (re.fullmatch(r"\w+=.*", rest[0]) or rest[0] in _OPENING):
        rest.pop(0)
    if rest:
        yield rest


def check_other(words: Sequence[str]) -> None:
    """Check a command that is not ours: known, with extras and targets that exist."""
    assert words[0] in OTHER_COMMANDS, f"{words[0]!r} is not a command for pages"
    if words[0] == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", targets, re.MULTILINE) for target in words[1:])
    if words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = {name for word in words for found in re.findall(r"\[(.*?)\]", word) for name in found.split(",")}
        missing = extras - set(project["optional-dependencies"])
        assert not missing, f"no such extra: {missing}"


def check_command(arguments: Sequence[str], app: typer.Typer = app) -> None:
    """Parse a command as the program does, without running it, and look up its names."""
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
    assert not benchmark or "/" in benchmark or benchmark in {*datasets.registered(), "images"}, benchmark
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
    with pytest.raises((AssertionError, UserError, REJECTED)):
        check_shell(line)


def test_plans_fit_their_pages() -> None:
    assert {name for plan in PLANS.values() for name in plan.given} == set(GIVEN)
    assert {*PLANS, *CHECKS} <= set(PAGES)
    for page, plan in PLANS.items():
        code = "".join(block.code for block in read_blocks(page))
        missing = [text for text in (*plan.swaps, *plan.parsed_only, *plan.elsewhere, *plan.twice) if text not in code]
        assert not missing, f"{page}: {missing}"
        for test in plan.elsewhere.values():
            assert page in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not run {page}"


# Executing


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with the program `probprompt`, which answers quickly."""
    folder = Path(tmp_path_factory.mktemp("bin"))
    arguments = [sys.executable, str(ROOT / "tests" / "command_server.py"), str(folder / "socket")]
    server = subprocess.Popen(arguments, env={**os.environ, **alone(folder)})
    try:
        while not (folder / "ready").exists():
            assert server.poll() is None, "the command server did not start"
            time.sleep(0.05)
        yield folder
    finally:
        server.terminate()
        server.wait()


def alone(folder: Path) -> dict[str, str]:
    """Return an environment without the user's Hugging Face files."""
    return {"HF_HOME": str(folder / ".hub"), "HF_HUB_DISABLE_XET": "1"}


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.is_executed for block in read_blocks(page))])
def test_page_works_as_pasted(
    page: str, tmp_path: Path, command: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    programs = (str(command), str(Path(sys.executable).parent), os.environ["PATH"])
    own = {"PROBPROMPT_CACHE": str(tmp_path / ".cache"), "PROBPROMPT_DATA": str(tmp_path / "data"), **alone(tmp_path)}
    for name, value in {"PATH": os.pathsep.join(programs), "OMP_NUM_THREADS": "1", **own}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    outputs, printed, namespace = list[str](), "", dict[str, Any]({"__name__": "__main__"})
    with ExitStack() as closing:
        world = World(lambda: request.getfixturevalue("small_model"), monkeypatch, closing)
        for name in PLANS[page].given if page in PLANS else ():
            world.prepare(name, tmp_path)
        for block in read_blocks(page):
            if block.language == "text" and printed:
                masked = [re.sub(r"\d+", "N", text.strip()) for text in (block.code, printed)]
                assert masked[0] == masked[1], f"{block}: not what the block before it prints"
            printed = ""
            if block.is_executed and block.language == "python":
                with redirect_stdout(io.StringIO()) as stream:
                    exec(compile(block.replaced, str(block), "exec"), namespace)
                printed = stream.getvalue()
            elif block.is_executed:
                outputs += [run_shell(block) for _ in range(1 + block.is_repeated)]
    if page in CHECKS:
        CHECKS[page](tmp_path, outputs)


def run_shell(block: Block) -> str:
    """Run a block by bash and return its output; a service is stopped once it has answered."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stream:
        words = ["bash", "-euo", "pipefail", "-c", block.replaced]
        process = subprocess.Popen(words, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if SERVE in block.code:
                visit(wait_for(STARTED, stream, process))
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
            code = process.wait(LONGEST_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it left running
            process.wait()
        output = read_again(stream)
    assert code == 0, f"{block}:\n{output}"
    return output


def read_again(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read()


def wait_for(text: str, stream: IO[str], process: subprocess.Popen[bytes]) -> str:
    """Return the output of a running program once it contains this text."""
    until = time.monotonic() + LONGEST_SECONDS
    while text not in (output := read_again(stream)):
        assert process.poll() is None and time.monotonic() < until, f"never printed {text!r}:\n{output}"
        time.sleep(0.05)
    return output


def visit(output: str) -> None:
    """Open the page whose address a service has printed."""
    address = re.findall(r"http://127\.0\.0\.1:\d+", output)[-1]
    with urlopen(address, timeout=30) as page:
        assert page.status == 200 and b"<html" in page.read()
