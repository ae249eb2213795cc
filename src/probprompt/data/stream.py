"""The stream of tasks: which classes come, in which order, and how they are cut into tasks.

Classes have two numbers: the id that the dataset gives them, and the label they get in order of appearance,
which is the row of the head that scores them.
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
    "allowed are a number of tasks (5), the number of classes of each task (4,4,2), or a file of class names "
    'as JSON such as [["cat", "dog"], ["owl"]] or as text with one line per task, commas between the names'
)
_NUMBERS = re.compile(r"-?[0-9]{1,9}(\s*,\s*-?[0-9]{1,9})*")


@dataclass(frozen=True)
class Task:
    """Classes that are learned together.

    index: place in the stream, from 0.
    classes: the dataset's class ids, in order of appearance.
    first: label of its first class; the others follow.
    """

    index: int
    classes: tuple[int, ...]
    first: int

    @classmethod
    def joined(cls, stream: Sequence["Task"]) -> "Task":
        """All tasks of a stream as one."""
        return cls(0, tuple(label for task in stream for label in task.classes), 0)


def class_order(count: int, seed: int) -> tuple[int, ...]:
    """Order the classes: as the dataset does for seed 0, shuffled for any other.

    The shuffle is that of `random.seed(seed); random.shuffle(...)`, which published results use.

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
    """Share classes out evenly; where that is impossible, the first tasks get one more.

    >>> split_sizes(10, 3)
    (4, 3, 3)
    """
    if tasks < 1:
        raise UserError(f"the number of tasks must be at least 1, got {tasks}")
    if tasks > count:
        raise UserError(f"{count} classes cannot fill {tasks} tasks: allowed are 1 to {count} tasks")
    size, rest = divmod(count, tasks)
    return tuple(size + (index < rest) for index in range(tasks))


def build_stream(
    class_names: Sequence[str], tasks: int | Sequence[int] | Sequence[Sequence[str]], seed: int
) -> tuple[Task, ...]:
    """Cut a dataset's classes into tasks.

    `tasks` is their number, or the number of classes of each, or the names of the classes of each. Names are
    an order of their own: the seed then has no say.

    >>> build_stream(["ant", "bee", "cat"], 2, seed=0)
    (Task(index=0, classes=(0, 1), first=0), Task(index=1, classes=(2,), first=2))
    >>> build_stream(["ant", "bee", "cat"], [["cat"], ["bee", "ant"]], seed=0)
    (Task(index=0, classes=(2,), first=0), Task(index=1, classes=(1, 0), first=1))
    """
    ids = _ids(class_names)
    if _is_number(tasks):
        return _cut(class_order(len(ids), seed), split_sizes(len(ids), tasks))
    items: list[object] = list(tasks) if _is_list(tasks) else []
    numbers = [item for item in items if _is_number(item)]
    lists = [item for item in items if _is_list(item)]
    if items and len(numbers) == len(items):
        if min(numbers) < 1:
            raise UserError(f"every task needs at least 1 class, got the sizes {numbers}")
        if sum(numbers) != len(ids):
            raise UserError(f"the sizes {numbers} add up to {sum(numbers)}, but there are {len(ids)} classes")
        return _cut(class_order(len(ids), seed), numbers)
    if items and len(lists) == len(items):
        return _cut(_named(ids, lists), [len(group) for group in lists])
    raise UserError(f"the tasks cannot be {tasks!r}: {_ALLOWED}")


def parse_tasks(text: str) -> int | tuple[int, ...] | tuple[tuple[str, ...], ...]:
    """Read what a user wrote for the tasks: a number, sizes, or the path of a file of class names.

    The file is JSON, a list of lists, or text: one line per task, names separated by commas; blank lines and
    lines that start with # do not count. A name that has a comma in it needs JSON.

    >>> parse_tasks("5")
    5
    >>> parse_tasks("4,4,2")
    (4, 4, 2)
    """
    text = text.strip()
    if not text:
        raise UserError(f"the tasks are empty: {_ALLOWED}")
    if _NUMBERS.fullmatch(text):
        numbers = tuple(int(number) for number in text.split(","))
        if min(numbers) < 1:
            raise UserError(f"the tasks {text!r} hold a number below 1: {_ALLOWED}")
        return numbers if len(numbers) > 1 else numbers[0]
    content = _read(Path(text))
    as_json = Path(text).suffix.lower() == ".json" or content.lstrip().startswith("[")
    return _parse_json(content, text) if as_json else _parse_lines(content, text)


def order_hash(tasks: Sequence[Task], class_names: Sequence[str]) -> str:
    """Name a stream by the SHA-256 of its tasks' class names, so that two runs can be told to share it.

    >>> names = ["ant", "bee", "cat"]
    >>> order_hash(build_stream(names, [2, 1], seed=0), names)[:12]
    'c500371cff07'
    """
    groups = [[class_names[label] for label in task.classes] for task in tasks]
    return hashlib.sha256(json.dumps(groups, separators=(",", ":")).encode()).hexdigest()


def _ids(class_names: Sequence[str]) -> dict[str, int]:
    """Give each class name its number in the dataset; refuse two of the same name."""
    if isinstance(class_names, str) or not class_names:
        raise UserError(f"the class names must be a list of at least one name, got {class_names!r}")
    ids: dict[str, int] = {}
    for number, name in enumerate(class_names):
        if ids.setdefault(name, number) != number:
            raise UserError(f"classes {ids[name]} and {number} have the same name {name!r}: rename one")
    return ids


def _cut(order: Sequence[int], sizes: Sequence[int]) -> tuple[Task, ...]:
    """Cut class ids in their order into tasks of these sizes."""
    firsts = accumulate(sizes, initial=0)
    return tuple(
        Task(index, tuple(order[first : first + size]), first)
        for index, (size, first) in enumerate(zip(sizes, firsts, strict=False))
    )


def _named(ids: dict[str, int], groups: Sequence[Sequence[object]]) -> list[int]:
    """Return the classes of all tasks; each class must be in exactly one. Messages count tasks from 1."""
    home: dict[str, int] = {}
    spelled = {unicodedata.normalize("NFC", name): name for name in ids}  # a Mac writes é as two characters
    for task, group in enumerate(groups, start=1):
        if not group:
            raise UserError(f"task {task} has no classes: give it some, or leave it out")
        for name in group:
            if not isinstance(name, str):
                raise UserError(f"task {task} has {name!r} where the name of a class is due")
            name = spelled.get(unicodedata.normalize("NFC", name), name)
            if name not in ids:
                raise UserError(f"task {task} has an unknown class {name!r}. {suggest(name, ids)}")
            if name in home:
                raise UserError(f"the class {name!r} is in task {home[name]} and in task {task}: keep one")
            home[name] = task
    missing = [name for name in ids if name not in home]
    if missing:
        raise UserError(f"{len(missing)} of {len(ids)} classes are in no task: {shorten(missing, 5)}")
    return [ids[name] for name in home]


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        problem = f"are no number, and no such file exists{_nearest_file(path)}"
    except (OSError, ValueError) as error:  # not to be opened, or no text
        problem = f"cannot be read as a text file ({error})"
    raise UserError(f"the tasks {str(path)!r} {problem}: {_ALLOWED}")


def _nearest_file(path: Path) -> str:
    try:
        names = [file.name for file in path.parent.iterdir() if file.is_file()]
    except OSError:  # no such folder either
        return ""
    near = get_close_matches(path.name, names, n=1)
    return f" (Did you mean {str(path.with_name(near[0]))!r}?)" if near else ""


def _parse_json(content: str, source: str) -> tuple[tuple[str, ...], ...]:
    try:
        groups: object = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{source} is not valid JSON ({error}): {_ALLOWED}") from error
    if not isinstance(groups, list) or not groups:
        raise UserError(f"{source} must hold a list of tasks: {_ALLOWED}")
    for task, group in enumerate(groups, start=1):
        if not isinstance(group, list) or not group or not all(isinstance(name, str) for name in group):
            raise UserError(f"{source}: task {task} must be a list of at least one class name, got {group!r}")
    return tuple(tuple(group) for group in groups)


def _parse_lines(content: str, source: str) -> tuple[tuple[str, ...], ...]:
    groups = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        names = tuple(name.strip() for name in line.split(","))
        if not all(names):
            raise UserError(f"{source}, line {number}: a comma has no class name beside it: {line.strip()!r}")
        groups.append(names)
    if not groups:
        raise UserError(f"{source} has no tasks in it: {_ALLOWED}")
    return tuple(groups)
