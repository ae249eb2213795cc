"""Additions to the site: the pages of results next to docs/, and the options of all commands.

mkdocs calls these functions while it builds (`hooks` in mkdocs.yml).
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
COMMANDS = "reference/command-line.md"
BOOK = "RESULTS.md"
"""The results book, which lies above docs/."""
_NAMED = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)\)")
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):(?:<code>|`)~?([\w.]+)(?:</code>|`)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take the pages of results, and whatever pages link to, into the site; make the page of commands."""
    for path in (ROOT / BOOK, *sorted((ROOT / "results").glob("*.md"))):
        files.append(_copy(path, config))
    for page in [file for file in files if file.is_documentation_page()]:
        for target in linked(page.content_string, page.src_uri):
            if target not in files.src_uris:
                files.append(_copy(ROOT / target, config))
    files.append(File.generated(config, COMMANDS, content=commands_page()))
    return files


def _copy(path: Path, config: MkDocsConfig) -> File:
    return File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))


def linked(text: str, uri: str) -> Iterator[str]:
    """What a page links to that lies outside of docs/, by its path in the repository."""
    for found in _LINK.finditer(text):
        target = in_repository(found[2], uri)
        if target and not target.startswith("docs/") and (ROOT / target).is_file():
            yield target


def in_repository(link: str, uri: str) -> str | None:
    """Where a relative link of a page of the site leads in the repository; None where it is no such link."""
    if re.match(r"[a-z]+:|/", link):
        return None
    home = PurePosixPath(uri if uri.startswith("results/") or uri == BOOK else f"docs/{uri}").parent
    return normpath(str(home / link))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links for the folders of the site, where docs/ is the top."""

    def within_the_site(found: re.Match[str]) -> str:
        target = in_repository(found[2], page.file.src_uri)
        if target is None:
            return found[0]
        wanted = target.removeprefix("docs/")
        home = str(PurePosixPath(page.file.src_uri).parent)
        return found[1] + relpath(wanted, home) + found[3] if wanted in files.src_uris else found[0]

    def without_folders(found: re.Match[str]) -> str:
        target = in_repository(found[2], page.file.src_uri)
        return f"`{found[1]}/`" if target and (ROOT / target).is_dir() else found[0]

    return _LINK.sub(within_the_site, _NAMED.sub(without_folders, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Names in docstrings as code."""
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)


# The commands


def commands_page() -> str:
    """Every command with its arguments and options, as its own help says them."""
    from probprompt.cli import app

    parts = [
        "# Command line",
        "`probprompt COMMAND --help` prints the same. Errors in the input end with exit code 2.",
    ]
    for words, command in walk(typer.main.get_command(app), ("probprompt",)):
        parts += [f"## {' '.join(words)}", str(command.help or ""), *_table(command)]
    return "\n\n".join(parts) + "\n"


def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands that do something by themselves, in the order of the program's help."""
    inside = getattr(command, "commands", {})
    if not inside or command.invoke_without_command:
        yield words, command
    for name, child in inside.items():
        yield from walk(child, (*words, name))


def _table(command: Any) -> list[str]:
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    return ["\n".join(["| | | by default |", "|---|---|---|", *rows])] if rows else []


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        name = name if parameter.required or name.startswith("[") else f"[{name}]"
    else:
        name = ", ".join(parameter.opts)
        name += "" if parameter.is_flag else f" {parameter.metavar or _kind(parameter)}"
    shown = getattr(parameter, "show_default", None)
    default = shown if isinstance(shown, str) else parameter.default
    text = "" if default is None or default is False or default == "" or callable(default) else f"`{default}`"
    cells = (f"`{name}`", escape(parameter.help or "", quote=False), text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kind(parameter: Any) -> str:
    """What an option takes, in a word."""
    kinds = {"int range": "N", "float range": "NUMBER", "path": "PATH", "choice": "CHOICE"}
    return kinds.get(str(parameter.type.name), "TEXT")
