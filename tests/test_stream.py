"""Class orders and the split of classes into tasks."""

import json
import random
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probprompt.data.stream import build_stream, class_order, order_hash, parse_tasks, split_sizes
from probprompt.errors import UserError

ANIMALS = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay")

quick = settings(max_examples=40, deadline=None)
counts = st.integers(1, 60)
words = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
seeds = st.integers(0, 10_000)


def names_of(count: int) -> list[str]:
    return [f"class {number}" for number in range(count)]


@st.composite
def counts_and_tasks(draw: st.DrawFn) -> tuple[int, int]:
    count = draw(counts)
    return count, draw(st.integers(1, count))


@pytest.mark.parametrize(
    ("count", "seed", "start"),
    [
        (200, 1, (33, 146, 79, 19, 23, 131, 12, 187, 174, 32)),
        (200, 2, (51, 94, 55, 35, 170, 177, 20, 85, 50, 36)),
        (200, 4, (136, 126, 189, 51, 145, 98, 0, 68, 40, 4)),
        (100, 1, (53, 37, 65, 51, 4, 20, 38, 9, 10, 81)),
        (100, 2, (0, 76, 61, 63, 1, 71, 2, 6, 16, 19)),
    ],
)
def test_published_class_orders(count: int, seed: int, start: tuple[int, ...]) -> None:
    before = random.getstate()
    assert class_order(count, seed)[: len(start)] == start
    assert random.getstate() == before


@quick
@given(counts_and_tasks(), seeds, seeds)
def test_stream_holds_every_class_exactly_once(drawn: tuple[int, int], seed: int, other: int) -> None:
    count, number = drawn
    names, sizes = names_of(count), split_sizes(count, number)
    tasks = build_stream(names, number, seed)
    order = [label for task in tasks for label in task.classes]
    assert sorted(order) == list(range(count)) and tuple(order) == class_order(count, seed)
    assert seed != 0 or order == list(range(count))
    assert [task.index for task in tasks] == list(range(number))
    assert all(order[task.first : task.first + len(task.classes)] == list(task.classes) for task in tasks)
    assert tuple(len(task.classes) for task in tasks) == sizes and all(type(size) is int for size in sizes)
    assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)
    assert build_stream(names, [[names[label] for label in task.classes] for task in tasks], other) == tasks


@quick
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), seeds)
def test_sizes_are_kept(sizes: list[int], seed: int) -> None:
    tasks = build_stream(names_of(sum(sizes)), sizes, seed)
    assert [len(task.classes) for task in tasks] == sizes
    assert [task.first for task in tasks] == [sum(sizes[:index]) for index in range(len(sizes))]
    with pytest.raises(FrozenInstanceError):
        tasks[0].index = 1  # type: ignore[misc]


@pytest.mark.parametrize(("count", "tasks"), [(3, 4), (3, 0), (3, -1), (0, 1)])
def test_impossible_splits(count: int, tasks: int) -> None:
    with pytest.raises(UserError, match=str(tasks)):
        split_sizes(count, tasks)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (11, "10 classes cannot fill 11 tasks"),
        (0, "got 0"),
        (True, "True"),
        ("5", "'5'"),
        ([5, True, 4], r"\[5, True, 4\]"),
        ([5, ["ant"]], "ant"),
        ([4, 4], r"\[4, 4\] add up to 8"),
        ([10, 0], "at least 1 class"),
        ([["ant"], ["bee", "kat"]], "'kat' in task 2. .*'cat'"),
        ([["ant", "bee"], ["cat"], ["ant"]], "'ant' .* 1 and 3"),
        ([["ant"]], "bee, cat, dog, elk, fox and 4 more"),
        ([list(ANIMALS), []], "Task 2"),
        ([["ant", 3]], "Task 1: .* 3"),
    ],
)
def test_impossible_tasks(tasks: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_stream(ANIMALS, tasks, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "message"), [(["ant", "bee", "ant"], "0 and 2 .*'ant'"), ([], "at least one"), ("ant", "list")]
)
def test_impossible_class_names(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_stream(names, 1, 0)


@pytest.mark.parametrize(
    ("text", "parsed"), [("5", 5), (" 12 ", 12), ("4,4,2", (4, 4, 2)), ("4, 4 ,2", (4, 4, 2)), ("1,1", (1, 1))]
)
def test_parse_numbers(text: str, parsed: object) -> None:
    assert parse_tasks(text) == parsed


@pytest.mark.parametrize(
    ("file", "content", "second"),
    [
        ("tasks.json", '[["ant", "bee"], ["queen, bee"]]', ("queen, bee",)),
        ("tasks.txt", '\n [["ant", "bee"], ["queen, bee"]]', ("queen, bee",)),
        ("tasks.json", '\ufeff[["ant", "bee"], ["queen, bee"]]', ("queen, bee",)),
        ("tasks", "# insects first\nant, bee\n\n  # then\n  sea lion ,café\r\n", ("sea lion", "café")),
    ],
)
def test_parse_file(tmp_path: Path, file: str, content: str, second: tuple[str, ...]) -> None:
    (tmp_path / file).write_text(content, encoding="utf-8")
    assert parse_tasks(str(tmp_path / file)) == (("ant", "bee"), second)


@quick
@given(groups=st.lists(st.lists(words, min_size=1, max_size=4), min_size=1, max_size=4))
def test_files_hold_any_names(tmp_path_factory: pytest.TempPathFactory, groups: list[list[str]]) -> None:
    path = tmp_path_factory.getbasetemp() / "names.txt"
    for text in (json.dumps(groups), "\n".join(", ".join(group) for group in groups)):
        path.write_text(text, encoding="utf-8")
        assert parse_tasks(str(path)) == tuple(map(tuple, groups))


@pytest.mark.parametrize("text", ["", "  ", "five", "0", "-3", "4,0,2", "4,", "5.0", "1e3", "9" * 5000, "a\0b"])
def test_invalid_task_texts(text: str) -> None:
    with pytest.raises(UserError, match=r"a number of tasks \(5\)"):
        parse_tasks(text)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.json", "[[", "line 1 column 3"),
        ("a.json", "{}", "a list of tasks"),
        ("a.json", '[["ant"], []]', "task 2 must be a list"),
        ("a.json", "[[1]]", "task 1 must be a list"),
        ("a.txt", "ant,\nbee", "line 1: .*'ant,'"),
        ("a.txt", "# nothing\n\n", "no tasks"),
        ("a.txt", b"\xff\xfe\x00", "text file"),
    ],
)
def test_invalid_task_files(tmp_path: Path, file: str, content: str | bytes, message: str) -> None:
    path = tmp_path / file
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=message) as error:
        parse_tasks(str(path))
    assert str(path) in str(error.value)


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    (tmp_path / "tasks.txt").touch()
    for path, message in (
        (tmp_path, "text file"),
        (tmp_path / "tasks.txt" / "below", "text file"),
        (tmp_path / "task.txt", r"Did you mean '.*tasks.txt'"),
        (tmp_path / "nowhere" / "tasks.txt", "existing file"),
    ):
        with pytest.raises(UserError, match=message):
            parse_tasks(str(path))


def test_order_hash_identifies_streams_by_class_name() -> None:
    streams = [build_stream(ANIMALS, tasks, seed) for tasks in (2, 5, [6, 4]) for seed in (0, 1)]
    hashes = {order_hash(tasks, ANIMALS) for tasks in streams}
    assert len(hashes) == len(streams) and all(len(digest) == 64 for digest in hashes)
    written = [["ant", "bee"], ["cat"]]
    one, other = ["ant", "bee", "cat"], ["cat", "ant", "bee"]  # numbered in another way
    first, second = build_stream(one, written, 0), build_stream(other, written, 0)
    assert order_hash(first, one) == order_hash(second, other) != order_hash(first, other)


def test_order_hash_never_changes() -> None:
    digest = order_hash(build_stream(ANIMALS, 3, 1), ANIMALS)
    assert digest == "5317bef73338803305929594bbcc278686c0da68cb9f492eeaa37f976db15c52"
