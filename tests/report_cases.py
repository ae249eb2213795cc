"""Folders of runs for reports, and pages of HTML as tests read them."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

from probprompt.evaluation import metrics

Matrix = list[list[float | None]]

VOID = {"meta", "link", "br", "hr", "img", "input", "col"}


class Page(HTMLParser):
    """Elements and texts of a page, checked for balance."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.raw = text
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute is repeated in <{tag}>"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in wanted.items())]

    def within(self, tag: str) -> list[str]:
        return [text for parent, text in self.texts if parent == tag]

    @property
    def headings(self) -> list[str]:
        return [text for parent, text in self.texts if re.fullmatch("h[1-6]", parent)]

    @property
    def text(self) -> str:
        return " ".join(text.replace("\u00a0", " ") for parent, text in self.texts if parent != "style")

    def check(self) -> None:
        """Assert that the page is accessible and needs nothing from elsewhere."""
        assert self.all("html") == [{"lang": "en"}] and self.all("meta", name="viewport")
        levels = [int(tag[1]) for tag, _ in self.elements if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
        plots = self.all("svg", **{"class": "plot"})
        assert plots and all(plot["role"] == "img" and plot["aria-label"] and plot["viewbox"] for plot in plots)
        assert all(header["scope"] in ("col", "row", "colgroup") for header in self.all("th"))
        assert not re.search(r"https?://|@import", self.raw) and len(self.raw.encode()) < 1_000_000
        assert not {tag for tag, _ in self.elements} & {"script", "link", "img", "iframe", "object", "embed"}
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert {f"#{name}" for name in ids} >= set(re.findall(r"url\(([^)]*)\)", self.raw))
        for _, attributes in self.elements:
            assert "src" not in attributes and not any(name.startswith("on") for name in attributes)
            target = attributes.get("href")
            assert target is None or target.startswith("data:image/png;base64,") or target[1:] in ids


def write_run(folder: Path, matrix: Matrix, diagnostics: dict[str, Any], **record: Any) -> Path:
    """Write the folder of a finished run; entries of its record given by name go over these."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "format": 1,
        "name": folder.name,
        "status": "finished",
        "created": "2026-03-14T09:21:07+00:00",
        "config_hash": "ab" * 32,
        "backbone": {"name": "vit_tiny", "sha256": "cd" * 32},
        "trainable_parameters": 12_345,
        "evaluated_on": "test",
        "marks": [],
    }
    known = metrics.from_json(matrix)
    accuracy = {"matrix": matrix, **metrics.summarize(known), "finished_steps": metrics.finished_steps(known)}
    for name, content in (("run", whole | record), ("accuracy", accuracy), ("diagnostics", diagnostics)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
