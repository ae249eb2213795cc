"""The shape of the code: who may import whom, and what stays light."""

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import probprompt

ROOT = Path(probprompt.__file__).parent
REPOSITORY = Path(__file__).parent.parent

LOW = {"errors", "progress", "storage", "hub", "randomness"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "progress": set(),
    "equations": set(),
    "prompts": set(),
    "evaluation.metrics": set(),
    "storage": {"errors"},
    "hub": {"errors"},
    "distributed": {"errors"},
    "kernels": {"errors"},
    "randomness": {"kernels"},
    "data": LOW | {"kernels"},
    "backbones": {"errors", "hub", "kernels", "prompts"},
    "heads": {"errors", "randomness", "kernels"},
    "methods": {"errors", "randomness", "kernels", "equations", "prompts", "heads"},
    "config": {"errors", "data", "heads", "methods"},
    "presets": {"errors", "config", "methods"},
}
"""What each package or module may import besides its own package; imports inside functions count."""
MAY_IMPORT["engine"] = LOW | {"kernels", "prompts", "distributed", "data", "backbones", "heads", "methods", "config"}
MAY_IMPORT["evaluation"] = LOW | {"prompts", "backbones", "methods", "engine"}
BELOW = MAY_IMPORT["engine"] | {"engine", "evaluation", "evaluation.metrics", "presets"}
MAY_IMPORT |= dict.fromkeys(("runs", "classifier", "bench"), BELOW)
MAY_IMPORT |= {
    "report": {"errors", "storage", "config", "presets", "methods", "data", "backbones", "evaluation.metrics", "runs"},
    "export": BELOW | {"runs", "classifier", "report"},
    "serve": {"errors", "progress", "storage", "data", "engine", "classifier", "report"},
    "api": BELOW | {"runs", "report"},
    "cli": BELOW - {"kernels", "heads", "prompts"}
    | {"api", "runs", "classifier", "bench", "report", "export", "serve"},
    "__main__": {"cli"},
}
ONLY = {"triton": ("kernels",), "timm": ("backbones", "kernels.vit_blocks"), "fastapi": ("serve",), "reproduction": ()}
"""Packages that only these parts may import."""


def _name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


MODULES = {_name(path): path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"}


class _AtRuntime(ast.NodeTransformer):
    """Removes imports for annotations only."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


@cache
def _imports(path: Path, annotations: bool = True) -> set[str]:
    """Modules that a file imports, inside functions too, by their full names."""
    names, tree = set(), ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree if annotations else _AtRuntime().visit(tree)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in inside if name.removeprefix("probprompt.") in MODULES}
            names |= modules | ({node.module} if len(modules) < len(inside) else set())
    return names - {"probprompt"}


def _own(module: str, annotations: bool = True) -> set[str]:
    """Modules of this package that a module imports."""
    names = _imports(MODULES[module], annotations)
    return {name.removeprefix("probprompt.") for name in names if name.startswith("probprompt.")}


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layers(module: str) -> None:
    package = module.split(".")[0]
    allowed = MAY_IMPORT.get(module, MAY_IMPORT[package])
    for name in _own(module) - {package}:
        parts = {name, name.split(".")[0]} if name not in MAY_IMPORT else {name}
        assert name.split(".")[0] == package or parts & allowed, f"{module} must not import {name}"
    for foreign, homes in ONLY.items():
        if any(name.split(".")[0] == foreign for name in _imports(MODULES[module])):
            assert module.startswith(homes), f"{module} must not import {foreign}"


def test_no_import_cycles() -> None:
    """Remove modules that import nothing left, until none is left."""
    left = {module: _own(module, annotations=False) - {module} for module in MODULES}
    while free := {module for module, names in left.items() if not names & set(left)}:
        left = {module: names for module, names in left.items() if module not in free}
    assert not left, f"cycle among {sorted(left)}"


def test_file_names_are_unique() -> None:
    names = [path.name for path in ROOT.rglob("*.py") if not path.name.startswith("__")]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_no_method_imports_another() -> None:
    shared = {"methods.base", "methods.settings"}
    for module in MODULES:
        if module.startswith("methods.") and module not in shared:
            assert not {name for name in _own(module) if name.startswith("methods.")} - shared, module


@cache
def _defined(path: Path) -> set[str]:
    """Names that a module defines at its top level, inside branches included."""
    names, nodes = set(), list[ast.AST](ast.parse(path.read_text(encoding="utf-8")).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes += ast.iter_child_nodes(node)
    return names


def _file(module: str) -> Path | None:
    path = ROOT.parent / module.replace(".", "/")
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _missing(path: Path) -> Iterator[str]:
    """Names that a file imports from this package, inside functions too, and that do not exist."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            wanted = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] != "probprompt":
                continue
            file = _file(module)
            if not file or (name and name not in _defined(file) and not _file(f"{module}.{name}")):
                yield f"{path}, line {node.lineno}: {module} {name}"


def test_imported_names_exist() -> None:
    """Read from the syntax tree, as some imports never run without a GPU."""
    folders = [REPOSITORY / name for name in ("src", "tests", "tools", "reproduction")]
    missing = [problem for folder in folders for path in sorted(folder.rglob("*.py")) for problem in _missing(path)]
    assert not missing, "\n".join(missing)


def _seconds(*arguments: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - begun


def test_import_is_quick_and_imports_nothing_heavy() -> None:
    probe = "import sys, probprompt; print(sorted({'torch', 'timm', 'matplotlib', 'datasets'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "[]"
    probe = "import sys, probprompt.api; print({'matplotlib', 'jinja2'} & set(sys.modules))"  # only a report needs them
    answer = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "set()"
    assert min(_seconds("-c", "import probprompt") for _ in range(3)) < 1.0


def test_commands_import_nothing_heavy() -> None:
    """Help and wrong options are answered without waiting for PyTorch."""
    commands = ", ".join(f"probprompt.cli.{path.stem}" for path in sorted((ROOT / "cli").glob("cmd_*.py")))
    heavy = "{'torch', 'numpy', 'timm', 'matplotlib', 'pydantic', 'rich'}"
    probe = f"import sys, {commands}; print({heavy} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "set()"


def test_reading_records_loads_no_backbone() -> None:
    """Whoever compares runs, or builds the book, does not wait for what trains them."""
    probe = "import sys, probprompt.runs.run; print({'timm', 'probprompt.engine.learner'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "set()"


def test_help_is_quick_and_needs_no_network() -> None:
    assert min(_seconds("-m", "probprompt", "--help") for _ in range(3)) < 1.5
    probe = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\nsocket.getaddrinfo = refuse\n"
        "sys.argv = ['probprompt', '--help']\n"
        "from probprompt.cli import main\nmain()\n"
    )
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


def test_public_names_exist() -> None:
    assert all(getattr(probprompt, name) is not None for name in probprompt.__all__)
