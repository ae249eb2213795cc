"""The stream of tasks: the order of classes and their split into tasks.

A class has an id in the dataset, and a label in order of appearance, which is its row in the head.
"""

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import TypeGuard

from probprompt.errors import UserError, shorten, suggest

_ALLOWED = (
    "Pass a number of tasks (5), the number of classes per task (4,4,2), or a file of class names: JSON such as "
    '[["cat", "dog"], ["owl"]], or text with one line per task, names separated by commas.'
)
_NUMBERS = re.compile(r"-?[0-9]{1,9}(\s*,\s*-?[0-9]{1,9})*")


@dataclass(frozen=True)
class Task:
    """Classes that are learned together."""

    index: int  # in the stream, from 0
    classes: tuple[int, ...]  # the dataset's ids, in order of appearance
    first: int  # label of the first class; the others follow

    @classmethod
    def joined(cls, stream: Sequence["Task"]) -> "Task":
        """Join all tasks of a stream."""
        return cls(0, tuple(label for task in stream for label in task.classes), 0)


def class_order(count: int, seed: int) -> tuple[int, ...]:
    """Return the dataset's order for seed 0, else a shuffled one.

    The shuffle equals `random.seed(seed); random.shuffle(...)`, as in published results.

    >>> class_order(5, 0)
    (0, 1, 2, 3, 4)
    >>> class_order(5, 1)
    (2, 3, 4, 0, 1)
    """
    order = list(range(count))
    if seed != 0:
        random.Random(seed).shuffle(order)
    return tuple(order)


def split_sizes(count: int, tasks: int) -> tuple[int, ...]:
    """Split classes evenly; the first tasks get one more if needed.

    >>> split_sizes(10, 3)
    (4, 3, 3)
    """
    if tasks < 1:
        raise UserError(f"The number of tasks must be at least 1, got {tasks}.")
    if tasks > count:
        raise UserError(f"{count} classes cannot fill {tasks} tasks. Choose 1 to {count} tasks.")
    size, rest = divmod(count, tasks)
    return tuple(size + (index < rest) for index in range(tasks))


def build_stream(
    class_names: Sequence[str], tasks: int | Sequence[int] | Sequence[Sequence[str]], seed: int
) -> tuple[Task, ...]:
    """Split a dataset's classes into tasks.

    `tasks` is their number, the number of classes of each, or the class names of each (then the seed has no effect).

    >>> build_stream(["ant", "bee", "cat"], 2, seed=0)
    (Task(index=0, classes=(0, 1), first=0), Task(index=1, classes=(2,), first=2))
    >>> build_stream(["ant", "bee", "cat"], [["cat"], ["bee", "ant"]], seed=0)
    (Task(index=0, classes=(2,), first=0), Task(index=1, classes=(1, 0), first=1))
    """
    ids = _ids(class_names)
    if _is_number(tasks):
        return _split(class_order(len(ids), seed), split_sizes(len(ids), tasks))
    items: list[object] = list(tasks) if _is_list(tasks) else []
    numbers = [item for item in items if _is_number(item)]
    lists = [item for item in items if _is_list(item)]
    if items and len(numbers) == len(items):
        if min(numbers) < 1:
            raise UserError(f"Every task needs at least 1 class, got sizes {numbers}.")
        if sum(numbers) != len(ids):
            raise UserError(f"The task sizes {numbers} add up to {sum(numbers)}, expected {len(ids)} classes.")
        return _split(class_order(len(ids), seed), numbers)
    if items and len(lists) == len(items):
        return _split(_named_ids(ids, lists), [len(group) for group in lists])
    raise UserError(f"Invalid tasks {tasks!r}. {_ALLOWED}")


def parse_tasks(text: str) -> int | tuple[int, ...] | tuple[tuple[str, ...], ...]:
    """Parse a number of tasks, task sizes, or the path of a file of class names.

    The file is JSON (a list of lists) or text with one line per task, names separated by commas; empty lines and lines
    that start with # are skipped. Names with a comma need JSON.

    >>> parse_tasks("5")
    5
    >>> parse_tasks("4,4,2")
    (4, 4, 2)
    """
    text = text.strip()
    if not text:
        raise UserError(f"No tasks given. {_ALLOWED}")
    if _NUMBERS.fullmatch(text):
        numbers = tuple(int(number) for number in text.split(","))
        if min(numbers) < 1:
            raise UserError(f"Invalid tasks {text!r}: numbers must be at least 1. {_ALLOWED}")
        return numbers if len(numbers) > 1 else numbers[0]
    content = _read(Path(text))
    as_json = Path(text).suffix.lower() == ".json" or content.lstrip().startswith("[")
    return _parse_json(content, text) if as_json else _parse_lines(content, text)


def order_hash(tasks: Sequence[Task], class_names: Sequence[str]) -> str:
    """Return the SHA-256 of the class names of all tasks.

    >>> names = ["ant", "bee", "cat"]
    >>> order_hash(build_stream(names, [2, 1], seed=0), names)[:12]
    'c500371cff07'
    """
    groups = [[class_names[label] for label in task.classes] for task in tasks]
    return hashlib.sha256(json.dumps(groups, separators=(",", ":")).encode()).hexdigest()


def _ids(class_names: Sequence[str]) -> dict[str, int]:
    if isinstance(class_names, str) or not class_names:
        raise UserError(f"Class names must be a list of at least one name, got {class_names!r}.")
    ids: dict[str, int] = {}
    for number, name in enumerate(class_names):
        if ids.setdefault(name, number) != number:
            raise UserError(f"Classes {ids[name]} and {number} have the same name {name!r}. Rename one.")
    return ids


def _split(order: Sequence[int], sizes: Sequence[int]) -> tuple[Task, ...]:
    firsts = accumulate(sizes, initial=0)
    return tuple(
        Task(index, tuple(order[first : first + size]), first)
        for index, (size, first) in enumerate(zip(sizes, firsts, strict=False))
    )


def _named_ids(ids: dict[str, int], groups: Sequence[Sequence[object]]) -> list[int]:
    tasks: dict[str, int] = {}
    spelled = {unicodedata.normalize("NFC", name): name for name in ids}  # macOS writes é as two characters
    for task, group in enumerate(groups, start=1):
        if not group:
            raise UserError(f"Task {task} has no classes. Add classes or remove it.")
        for name in group:
            if not isinstance(name, str):
                raise UserError(f"Task {task}: expected a class name, got {name!r}.")
            name = spelled.get(unicodedata.normalize("NFC", name), name)
            if name not in ids:
                raise UserError(f"Unknown class {name!r} in task {task}. {suggest(name, ids)}")
            if name in tasks:
                raise UserError(f"Class {name!r} is in tasks {tasks[name]} and {task}. Remove it from one.")
            tasks[name] = task
    missing = [name for name in ids if name not in tasks]
    if missing:
        raise UserError(f"{len(missing)} of {len(ids)} classes are in no task: {shorten(missing, 5)}. Add them.")
    return [ids[name] for name in tasks]


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        problem = f"neither numbers nor an existing file{_nearest_file(path)}"
    except (OSError, ValueError) as error:
        problem = f"not a readable text file ({error})"
    raise UserError(f"Invalid tasks {str(path)!r}: {problem}. {_ALLOWED}")


def _nearest_file(path: Path) -> str:
    try:
        names = [file.name for file in path.parent.iterdir() if file.is_file()]
    except OSError:  # the folder does not exist
        return ""
    near = get_close_matches(path.name, names, n=1)
    return f" (Did you mean {str(path.with_name(near[0]))!r}?)" if near else ""


def _parse_json(content: str, source: str) -> tuple[tuple[str, ...], ...]:
    try:
        groups: object = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{source} is not valid JSON ({error}). {_ALLOWED}") from error
    if not isinstance(groups, list) or not groups:
        raise UserError(f"{source} must contain a list of tasks. {_ALLOWED}")
    for task, group in enumerate(groups, start=1):
        if not isinstance(group, list) or not group or not all(isinstance(name, str) for name in group):
            raise UserError(f"{source}: task {task} must be a list of at least one class name, got {group!r}.")
    return tuple(tuple(group) for group in groups)


def _parse_lines(content: str, source: str) -> tuple[tuple[str, ...], ...]:
    groups = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        names = tuple(name.strip() for name in line.split(","))
        if not all(names):
            raise UserError(f"{source}, line {number}: expected a class name next to each comma, got {line.strip()!r}.")
        groups.append(names)
    if not groups:
        raise UserError(f"{source} contains no tasks. {_ALLOWED}")
    return tuple(groups)
