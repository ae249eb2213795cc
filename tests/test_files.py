"""Files are written whole or not at all, and damage to tensors is noticed without running any code."""

import errno
import os
import pickle
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from probprompt import storage
from probprompt.errors import UserError
from probprompt.storage import read_json, read_tensors, remove_parts, write_bytes, write_json, write_tensors, write_with

CPU = torch.device("cpu")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that was written before, alone in its folder."""
    write_bytes(tmp_path / "file.bin", b"old")
    return tmp_path / "file.bin"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a file system may not be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_file_is_replaced_and_nothing_else_is_left(old: Path) -> None:
    write_bytes(old, b"new")
    assert old.read_bytes() == b"new"
    assert names(old.parent) == ["file.bin"]


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), KeyError()])
def test_a_writer_that_fails_leaves_the_old_file_alone(old: Path, problem: BaseException) -> None:
    def fill(temporary: Path) -> None:
        temporary.write_bytes(b"half of the n")
        raise problem

    with pytest.raises((UserError, KeyboardInterrupt, KeyError)):
        write_with(old, fill)
    assert old.read_bytes() == b"old"
    assert names(old.parent) == ["file.bin"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_before_the_exchange_leaves_the_old_file_alone(
    old: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr({"fsync": os, "replace": Path}[step], step, fail)
    with pytest.raises(UserError, match=r"file\.bin could not be written: Input/output error"):
        write_bytes(old, b"new")
    monkeypatch.undo()
    assert old.read_bytes() == b"old"
    assert names(old.parent) == ["file.bin"]


def test_the_new_file_is_on_disk_before_it_replaces_the_old(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    monkeypatch.setattr(os, "fsync", lambda handle: order.append("fsync"))
    monkeypatch.setattr(Path, "replace", lambda *_: order.append("replace"))
    write_bytes(old, b"new")
    assert order == ["fsync", "replace", "fsync"]  # the file, then the folder


def test_a_full_disk_is_named_and_harms_nothing(small_disk: Path) -> None:
    path = small_disk / "state.bin"
    write_bytes(path, b"o" * 20_000)
    with pytest.raises(UserError, match=r"state\.bin could not be written: the disk is full.*before is intact"):
        write_bytes(path, b"n" * 60_000)
    assert path.read_bytes() == b"o" * 20_000
    assert names(small_disk) == ["state.bin"]
    write_bytes(path, b"n" * 30_000)  # there is room for this one: nothing was left behind
    assert path.read_bytes() == b"n" * 30_000


def test_a_limit_on_the_size_of_files_harms_nothing(old: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match="could not be written: File too large"):
            write_bytes(old, b"n" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert old.read_bytes() == b"old"
    assert names(old.parent) == ["file.bin"]


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"")
    (tmp_path / "b").write_bytes(b"")
    ours, usual = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab")
    assert ours == usual


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    write_bytes(tmp_path / "inner" / "whole.part", b"whole")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # a process that is killed does not clean up
    monkeypatch.setattr(Path, "replace", lambda *_: None)
    write_bytes(tmp_path / "inner" / "file.bin", b"half")
    monkeypatch.undo()
    assert len(names(tmp_path / "inner")) == 2
    remove_parts(tmp_path)
    assert names(tmp_path / "inner") == ["whole.part"]


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"file\.bin could not be written: No such file or directory"):
        write_bytes(tmp_path / "nowhere" / "file.bin", b"x")


def test_json_is_written_readably_and_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"Käse": [1, None]})
    assert read_json(path) == {"Käse": [1, None]} and "Käse" in path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == {"Käse": [1, None]}
    assert names(tmp_path) == ["a.json"]


def test_json_that_is_missing_or_broken_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.json cannot be read: No such file"):
        read_json(tmp_path / "a.json")
    for content in (b'{"a": ', b"\xff\xfe"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.json is damaged: it is not valid JSON"):
            read_json(tmp_path / "a.json")


TENSORS: dict[str, Tensor] = {
    "float32": torch.tensor([[1.5, -0.0], [float("nan"), float("inf")]]),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "float16": torch.tensor([0.1], dtype=torch.float16),
    "bfloat16": torch.tensor([0.1, 3.0], dtype=torch.bfloat16),
    "int64": torch.tensor([-(2**40), 7]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.25),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "slice": torch.arange(10.0)[::3],
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


def same(first: Tensor, second: Tensor) -> bool:
    """Bit by bit, with type and shape."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    bits = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*bits)


def test_tensors_of_all_kinds_come_back_bit_by_bit(tmp_path: Path) -> None:
    note = {"task": 3, "name": "Käse", "matrix": [[1.5, None]]}
    write_tensors(tmp_path / "a.safetensors", TENSORS, note)
    found, told = read_tensors(tmp_path / "a.safetensors", CPU)
    assert told == note and found.keys() == TENSORS.keys()
    assert all(same(found[name], TENSORS[name]) for name in TENSORS)


def test_the_same_tensors_are_the_same_bytes(tmp_path: Path) -> None:
    for number in range(10):
        write_tensors(tmp_path / str(number), TENSORS, {"b": 1, "a": 2})
    assert len({(tmp_path / str(number)).read_bytes() for number in range(10)}) == 1


def test_one_wrong_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.arange(3.0), "s": torch.tensor(1)}, {"x": 1})
    whole = path.read_bytes()
    for place in range(len(whole)):
        for change in (0x01, 0x13 if place % 2 else 0xFF):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
            with pytest.raises(UserError, match=r"a\.safetensors (is damaged|was not written by probprompt)"):
                read_tensors(path, CPU)


def test_a_file_cut_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.arange(3.0)}, {"x": 1})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"a\.safetensors is damaged and was not loaded"):
            read_tensors(path, CPU)


def test_bytes_that_only_change_their_type_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.arange(4.0)}, {})
    for wrong in (b'"I32"', b'"U32"'):
        path.write_bytes(path.read_bytes().replace(b'"F32"', wrong))
        with pytest.raises(UserError, match="do not match its digest"):
            read_tensors(path, CPU)
        path.write_bytes(path.read_bytes().replace(wrong, b'"F32"'))
    assert torch.equal(read_tensors(path, CPU)[0]["a"], torch.arange(4.0))


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return Path.write_text, (self.mark, "boom")  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_under_another_name_is_refused_and_never_run(tmp_path: Path, kind: str) -> None:
    path, mark = tmp_path / "a.safetensors", tmp_path / "mark"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save({"a": Bomb(mark)}, path)
    with pytest.raises(UserError, match="is damaged and was not loaded"):
        read_tensors(path, CPU)
    assert not mark.exists()
    if kind == "pickle":
        pickle.loads(path.read_bytes())  # the bomb is a real one
        assert mark.read_text() == "boom"


def test_tensors_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(UserError, match="was not written by probprompt"):
        read_tensors(path, CPU)
    save_file({"a": torch.ones(2)}, path, {"probprompt": f"{'0' * 64} {{}}"})
    with pytest.raises(UserError, match="do not match its digest"):
        read_tensors(path, CPU)


def test_missing_tensors_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.safetensors is missing"):
        read_tensors(tmp_path / "a.safetensors", CPU)
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(UserError, match=r"a\.safetensors is damaged and was not loaded"):
        read_tensors(tmp_path / "a.safetensors", CPU)


def test_every_file_goes_through_the_atomic_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    whole = storage.write_with

    def spy(path: Path, fill: Callable[[Path], None]) -> None:
        written.append(path.name)
        whole(path, fill)

    monkeypatch.setattr(storage, "write_with", spy)
    write_json(tmp_path / "a.json", 1)
    write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1)}, {})
    assert written == ["a.json", "a.safetensors"]


def test_a_lock_lasts_until_the_last_process_with_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = storage.lock(tmp_path / "lock")
    assert held
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, pass_fds=[held.fileno()]) as heir:
        held.close()
        with pytest.raises(BlockingIOError):
            storage.lock(tmp_path / "lock")
        heir.kill()
    again = storage.lock(tmp_path / "lock", wait=True)
    assert again
    again.close()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert storage.lock(tmp_path / "lock") is None, "a system without locks keeps no process out"
