"""The site: built without a warning, whole, and readable without anything from elsewhere."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
import typer

import probprompt
from probprompt.cli import app

ROOT = Path(__file__).parent.parent
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that fetch something when a page is shown, and the attribute that says what."""
TUTORIALS = ("own-photos", "reproducing", "adding-a-method")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `mkdocs build --strict` makes it."""
    folder = Path(tmp_path_factory.mktemp("site")) / "site"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Seen(HTMLParser):
    """What a page has, loads and links to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names, self.loaded, self.links = set[str](), list[str](), list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag in LOADED and given.get(LOADED[tag]) and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given[LOADED[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Seen]:
    """All pages, but for the one about pages that are not there: it may be shown from anywhere."""
    return {path: Seen(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_of_the_docs_is_there(pages: dict[Path, Seen], site: Path) -> None:
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    wanted |= {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "results").glob("*.md")}
    wanted |= {Path("RESULTS.html"), Path("CHANGELOG.html")}
    assert wanted | {Path("reference/command-line.html")} == {path.relative_to(site) for path in pages}
    assert {Path(f"tutorials/{name}.html") for name in TUTORIALS} <= wanted


def test_every_extra_is_described() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("| Extra |")[2].partition("\n\n")[0]
    assert not [name for name in extras if f"`{name}`" not in table], "say in docs/index.md what they add"


def test_nothing_is_fetched_from_elsewhere(pages: dict[Path, Seen], site: Path) -> None:
    for path, seen in pages.items():
        assert not [target for target in seen.loaded if "//" in target], path.relative_to(site)
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert "url(http" not in text and "@import" not in text


def test_all_links_lead_somewhere(pages: dict[Path, Seen], site: Path) -> None:
    for path, seen in pages.items():
        for link in {*seen.links, *seen.loaded}:
            if "://" in link or link.startswith(("mailto:", "javascript:")):
                continue
            target, anchor = urldefrag(link)
            found = (path.parent / unquote(target)).resolve() if target else path
            assert found.exists(), f"{path.relative_to(site)}: {link}"
            if anchor and found in pages:
                assert unquote(anchor) in pages[found].names, f"{path.relative_to(site)}: {link}"


def test_the_reference_has_every_public_name(pages: dict[Path, Seen]) -> None:
    described = {name for seen in pages.values() for name in seen.names}
    public = [name for name in probprompt.__all__ if name != "__version__"]
    assert not [name for name in public if f"probprompt.{name}" not in described]
    from probprompt import classifier

    answers = [name for name in classifier.__all__ if name != "changing"]
    assert not [name for name in answers if not any(known.endswith(f".{name}") for known in described)]


def _commands(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    inside = getattr(command, "commands", {})
    yield from ((words, command),) if not inside else ()
    for name, child in inside.items():
        yield from _commands(child, f"{words}-{name}")


def test_the_reference_has_every_command_and_option(pages: dict[Path, Seen], site: Path) -> None:
    path = site / "reference" / "command-line.html"
    text = path.read_text(encoding="utf-8")
    for words, command in _commands(typer.main.get_command(app), "probprompt"):
        assert words in pages[path].names, words
        own = text.partition(f'id="{words}"')[2].partition("<h2")[0]
        options = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
        assert not [name for name in options if name not in own], words


def test_docstrings_are_shown_as_words(pages: dict[Path, Seen], site: Path) -> None:
    """No markup of another language is left over."""
    for path in (site / "reference").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert ":class:" not in text and ":func:" not in text and ":meth:" not in text, path.name
        assert "<blockquote>" not in text, f"{path.name}: examples are no quotations"
    assert "&gt;&gt;&gt; " in (site / "reference" / "equations.html").read_text(encoding="utf-8")


def test_the_search_knows_the_pages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {f"tutorials/{name}.html" for name in TUTORIALS} <= places
