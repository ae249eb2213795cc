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
# A module may import what stands before its own line, never what stands after it.
LAYERS: list[set[str]] = [
    {"capture", "errors", "kernels", "randomness", "equations", "prompts", "transport"}
    | {"distributed", "evaluation.metrics", "progress"},
    {"hub", "storage"},
    {"data", "weights_files"},
    {"fused"},
    {"backbone", "checkpoints"},
    {"heads"},
    {"alignment"},
    {"methods"},
    {"config"},
    {"presets"},
    {"training"},
    {"evaluation"},
    {"runs"},
    {"report"},
    {"classifier"},
    {"export"},
    {"serve"},
    {"bench"},
    {"api"},
    {"cli"},
    {"__main__"},
]
FREE = {
    "bench",
    "classifier",
    "export",
    "serve",
    "kernels",
    "data",
    "training",
    "evaluation",
    "runs",
    "methods",
    "backbone",
    "report",
    "cli",
}  # may import their own kind


def _layer(module: str) -> int:
    parts = module.split(".")
    for length in (2, 1):
        for level, names in enumerate(LAYERS):
            if ".".join(parts[:length]) in names:
                return level
    raise AssertionError(f"{module} has no place in LAYERS: give it one")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "probprompt":
            found |= {alias.name for alias in node.names if alias.name != "__version__"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("probprompt."):
            found.add((node.module or "").removeprefix("probprompt."))
    return found


MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for imported in _imports(path):
        same_package = imported.split(".")[0] == module.split(".")[0] and module.split(".")[0] in FREE
        helper = module == "checkpoints" and imported == "backbone"
        assert same_package or helper or _layer(imported) < _layer(module) or _layer(module) == 0, (
            f"{module} must not import {imported}"
        )


# The parts that can be understood alone: all that they may know.
KNOWS: dict[str, set[str]] = {
    "equations": set(),
    "prompts": set(),
    "transport": set(),
    "progress": set(),
    "hub": {"errors"},
    "storage": {"errors"},
    "kernels": {"kernels", "errors", "data"},
    "data": {"data", "errors", "hub", "kernels", "progress", "randomness", "storage"},
    "fused": {"kernels"},
    "backbone": {"errors", "fused", "kernels", "prompts"},
    "heads": {"errors", "randomness"},
    "alignment": {"capture", "heads", "randomness"},
    "methods": {
        "methods",
        "equations",
        "kernels",
        "prompts",
        "transport",
        "heads",
        "alignment",
        "errors",
        "randomness",
    },
}


@pytest.mark.parametrize("part", KNOWS)
def test_what_can_be_understood_alone_knows_little(part: str) -> None:
    paths = [path for path in MODULES if path.relative_to(ROOT).with_suffix("").parts[0] == part]
    assert paths, f"{part} is gone"
    for path in paths:
        known = {imported.split(".")[0] for imported in _imports(path)}
        assert known <= KNOWS[part], f"{path.relative_to(ROOT)} must not know {known - KNOWS[part]}"


def test_the_package_does_not_know_the_reproduction() -> None:
    """It is not part of the wheel."""
    for path in MODULES:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in names if name.split(".")[0] == "reproduction"], path


def test_no_method_imports_another() -> None:
    for path in (ROOT / "methods").glob("*.py"):
        if path.name not in ("__init__.py", "base.py"):
            others = {name for name in _imports(path) if name.startswith("methods.")} - {"methods.base"}
            assert not others, f"{path.name} imports {others}"


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
    folders = [Path(__file__).parent.parent / name for name in ("src", "tests", "tools", "reproduction")]
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
