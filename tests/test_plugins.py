"""Methods of other packages, found by their entry point."""

import os
import subprocess
import sys
from pathlib import Path

METHOD = """
from typing import Literal

from probprompt.methods.base import Method, MethodConfig, Prompted, register


class PlainConfig(MethodConfig):
    name: Literal["plain-plugin"] = "plain-plugin"


@register
class Plain(Method):
    Config = PlainConfig
    summary = "a method of another package"
    needs_query = False
    learns = False

    def __init__(self, config, shape, seed):
        super().__init__(shape, seed)

    def prompts(self, query, context):
        return Prompted()
"""


def command(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "probprompt", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def install(site: Path, source: str) -> Path:
    """Lay a package out as pip would."""
    about = site / "plain_plugin-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[probprompt.methods]\nplain = plain_plugin:Plain\n")
    (site / "plain_plugin.py").write_text(source)
    return site


def test_method_of_another_package_is_listed_and_trains(tmp_path: Path, pictures: Path) -> None:
    site = install(tmp_path / "site", METHOD)
    assert "a method of another package" in command(site, "list", "methods").stdout
    tiny = ("--set", "backbone.name=test_vit", "--set", "weights=random", "--set", "image_size=32")
    run = command(site, "train", pictures, "--method", "plain-plugin", "--epochs", 1, *tiny, "--out", tmp_path / "run")
    assert run.returncode == 0, run.stderr
    assert '"plain-plugin"' in (tmp_path / "run/run.json").read_text()


def test_method_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    answer = command(install(tmp_path / "site", "import nothing_of_this_name"), "list", "methods")
    assert answer.returncode == 2 and "plain_plugin:Plain" in answer.stderr and "nothing_of_this_name" in answer.stderr
