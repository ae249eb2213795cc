"""Files are written whole or not at all, and damage to tensors is noticed without running any code."""

import errno
import os
import pickle
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from probprompt import storage
from probprompt.errors import UserError
from probprompt.storage import read_json, read_tensors, remove_parts, write_bytes, write_json, write_tensors, write_with
from run_cases import CPU, Bomb, small_disk


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An earlier version of a file, the only one in its folder."""
    write_bytes(tmp_path / "file.bin", b"old")
    return tmp_path / "file.bin"


def assert_unchanged(old: Path) -> None:
    assert old.read_bytes() == b"old" and names(old.parent) == ["file.bin"]


def test_file_is_replaced_on_disk_and_nothing_else_is_left(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes(old, b"new")
    assert old.read_bytes() == b"new" and names(old.parent) == ["file.bin"]
    (old.parent / "other.bin").write_bytes(b"")
    assert len({stat.S_IMODE(path.stat().st_mode) for path in old.parent.iterdir()}) == 1  # the default permissions
    order = list[str]()
    monkeypatch.setattr(os, "fsync", lambda handle: order.append("fsync"))
    monkeypatch.setattr(Path, "replace", lambda *_: order.append("replace"))
    write_bytes(old, b"new")
    assert order == ["fsync", "replace", "fsync"]  # the file, then the folder


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), KeyError()])
def test_failing_writer_keeps_the_old_file(old: Path, problem: BaseException) -> None:
    def fill(temporary: Path) -> None:
        temporary.write_bytes(b"half of the n")
        raise problem

    with pytest.raises((UserError, KeyboardInterrupt, KeyError)):
        write_with(old, fill)
    assert_unchanged(old)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failing_system_call_keeps_the_old_file(old: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr({"fsync": os, "replace": Path}[step], step, fail)
    with pytest.raises(UserError, match=r"file\.bin: Input/output error"):
        write_bytes(old, b"new")
    assert_unchanged(old)


def test_full_disk_is_named_and_harms_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as folder:
        path = folder / "state.bin"
        write_bytes(path, b"o" * 20_000)
        with pytest.raises(UserError, match=r"state\.bin: the disk is full"):
            write_bytes(path, b"n" * 60_000)
        assert path.read_bytes() == b"o" * 20_000 and names(folder) == ["state.bin"]
        write_bytes(path, b"n" * 30_000)  # there is room for this one: nothing was left behind
        assert path.read_bytes() == b"n" * 30_000


def test_limit_on_the_size_of_files_harms_nothing(old: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match="File too large"):
            write_bytes(old, b"n" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_unchanged(old)
    with pytest.raises(UserError, match=r"file\.bin: No such file or directory"):
        write_bytes(old.parent / "nowhere" / "file.bin", b"x")


def test_only_parts_of_killed_writers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    write_bytes(tmp_path / "inner" / "whole.part", b"whole")
    with monkeypatch.context() as killed:  # a process that is killed does not clean up
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        killed.setattr(Path, "replace", lambda *_: None)
        write_bytes(tmp_path / "inner" / "file.bin", b"half")
    assert len(names(tmp_path / "inner")) == 2
    remove_parts(tmp_path)
    assert names(tmp_path / "inner") == ["whole.part"]


def test_json_is_readable_and_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(UserError, match=r"a\.json: No such file"):
        read_json(path)
    write_json(path, {"Käse": [1, None]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == {"Käse": [1, None]} and "Käse" in path.read_text(encoding="utf-8")
    assert names(tmp_path) == ["a.json"]
    for content in (b'{"a": ', b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.json is corrupted"):
            read_json(path)


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


def is_same(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors have the same type, shape and bits."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*[tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (first, second)])


def test_tensors_of_all_kinds_come_back_bit_exact(tmp_path: Path) -> None:
    note = {"task": 3, "name": "Käse", "matrix": [[1.5, None]]}
    for number in range(10):
        write_tensors(tmp_path / f"{number}.safetensors", TENSORS, note)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    found, noted = read_tensors(tmp_path / "0.safetensors", CPU)
    assert noted == note and found.keys() == TENSORS.keys()
    assert all(is_same(found[name], TENSORS[name]) for name in TENSORS)


def test_every_changed_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.arange(3.0), "s": torch.tensor(1)}, {"x": 1})
    whole = path.read_bytes()
    for place in range(len(whole)):
        for change in (0x01, 0x13 if place % 2 else 0xFF):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
            with pytest.raises(UserError, match=r"a\.safetensors (is corrupted|was not written by probprompt)"):
                read_tensors(path, CPU)
        path.write_bytes(whole[:place])
        with pytest.raises(UserError, match=r"a\.safetensors is corrupted"):
            read_tensors(path, CPU)
    for wrong in (b'"I32"', b'"U32"'):  # the same bytes of another type
        path.write_bytes(whole.replace(b'"F32"', wrong))
        with pytest.raises(UserError, match="do not match its hash"):
            read_tensors(path, CPU)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_pickle_under_another_name_never_runs(tmp_path: Path, kind: str) -> None:
    path, mark = tmp_path / "a.safetensors", tmp_path / "mark"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save({"a": Bomb(mark)}, path)
    with pytest.raises(UserError, match="is corrupted"):
        read_tensors(path, CPU)
    assert not mark.exists()
    if kind == "pickle":
        pickle.loads(path.read_bytes())  # the bomb is a real one
        assert mark.is_dir()


def test_foreign_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(UserError, match=r"a\.safetensors does not exist"):
        read_tensors(path, CPU)
    for note, message in ((None, "was not written by probprompt"), (f"{'0' * 64} {{}}", "do not match its hash")):
        save_file({"a": torch.ones(2)}, path, {"probprompt": note} if note else None)
        with pytest.raises(UserError, match=message):
            read_tensors(path, CPU)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"a\.safetensors is corrupted"):
        read_tensors(path, CPU)


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
