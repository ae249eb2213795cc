"""Pickles of plain data, read without running anything that they say.

A pickle is a programme, and Python's own reader carries it out. This one knows the instructions that make texts,
numbers, lists, dictionaries and arrays of bytes, and no other. It imports nothing and calls nothing: the three names
by which NumPy writes an array, and the one by which Python 3 writes bytes for Python 2, are words to it, and whatever
else a file asks for is refused.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probprompt.errors import UserError

LARGEST = 2**30
"""Bytes that a file may have: CIFAR's are 155 MB."""
LONGEST = 10**7
"""Items that all lists may have together: a small file can name a long list many times."""

_ARRAYS = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
_NDARRAY, _DTYPE = ("numpy", "ndarray"), ("numpy", "dtype")
_ENCODE = ("_codecs", "encode")  # bytes as a text of as many letters, in protocols that have no bytes
_BYTES = {b"u1", "u1"}
_PLAIN = {type(None), str, bytes, int, bool}
_MARK = object()
_STOP = ord(".")
_REMEMBER, _REMEMBER_LONG = b"qr"
_SMALL = re.compile(rb"(?:K.)+", re.DOTALL)


class RefusedPickleError(Exception):
    """A pickle that holds anything but plain data; the message says what."""


class _Name(tuple[str, str]):
    """A module and a name in it, never looked up."""


class _Type:
    """The type of an array's numbers: bytes, the only one there is."""


class _Array:
    """An array, empty until its state is given."""

    content: NDArray[np.uint8] | None = None


def read_pickle(path: Path) -> dict[str | bytes | int, Any]:
    """Read a dictionary of texts, numbers, lists of them and arrays of bytes; anything else is refused.

    Texts of Python 2 are given as ``bytes``.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} is larger than {LARGEST} bytes: this is no file of CIFAR's")
        data = path.read_bytes()
    except OSError as problem:
        raise UserError(f"{path} cannot be read: {problem.strerror or problem}") from None
    try:
        return _plain(_Machine(data).run())
    except RefusedPickleError as problem:
        raise UserError(f"{path} is refused: {problem}. Nothing of it was run; get the file anew") from None


class _Machine:
    """Carries out the instructions of plain data."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Everything up to the stop."""
        try:
            while self.place < len(self.data):
                code = self.data[self.place]
                self.place += 1
                if code == _STOP:
                    return self._finished()
                if code not in _BY_NUMBER:
                    raise RefusedPickleError(f"it has the instruction {bytes([code])!r} at byte {self.place - 1}")
                _BY_NUMBER[code](self)
            raise RefusedPickleError("it ends too early")
        except (IndexError, KeyError, TypeError, ValueError) as problem:
            raise RefusedPickleError(f"it is damaged near byte {self.place} ({problem})") from None

    def _finished(self) -> Any:
        (value,) = self.stack
        return value

    def _take(self, count: int) -> bytes:
        piece = self.data[self.place : self.place + count]
        if len(piece) < count:
            raise RefusedPickleError("it ends too early")
        self.place += count
        return piece

    def _number(self, size: int, signed: bool = False) -> int:
        """A number of so many bytes."""
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _line(self) -> str:
        end = self.data[self.place : self.place + 256].index(b"\n")
        return str(self._take(end + 1)[:-1], "ascii")

    def _to_mark(self) -> list[Any]:
        start = len(self.stack) - 1
        while self.stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise ValueError("no mark")
        found = self.stack[start + 1 :]
        del self.stack[start:]
        return found

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def skip(self, size: int) -> None:
        """Pass over a number that says nothing to this reader."""
        self._number(size)

    def small_integers(self) -> None:
        """Whole numbers of one byte, all that follow each other: a list of labels has 50,000."""
        run = _SMALL.match(self.data, self.place - 1)
        if run is None:
            raise RefusedPickleError("it ends too early")
        self.stack.extend(self.data[self.place : run.end() : 2])  # a byte of bytes is a number
        self.place = run.end()

    def integer(self, size: int, signed: bool = False) -> None:
        """A whole number."""
        self.push(self._number(size, signed))

    def short_octets(self, code: int) -> None:
        """Bytes, their number in one byte before them, and all that follow each other: a list of names has 50,000.

        Each may be remembered, in the order and by the numbers that the file gives.
        """
        data, place = self.data, self.place
        while True:
            end = place + 1 + data[place]
            if end >= len(data):
                raise RefusedPickleError("it ends too early")
            value = data[place + 1 : end]
            self.stack.append(value)
            if data[end] == _REMEMBER:
                self.memo[data[end + 1]] = value
                end += 2
            elif data[end] == _REMEMBER_LONG:
                self.memo[int.from_bytes(data[end + 1 : end + 5], "little")] = value
                end += 5
            if data[end] != code:
                break
            place = end + 1
        self.place = end

    def octets(self, size: int) -> None:
        """Bytes, their number before them."""
        self.push(self._take(self._number(size)))

    def text(self, size: int) -> None:
        """Text, its number of bytes before it."""
        self.push(str(self._take(self._number(size)), "utf-8"))

    def remember(self, size: int | None) -> None:
        """Keep the top of the stack under a number."""
        self.memo[len(self.memo) if size is None else self._number(size)] = self.stack[-1]

    def recall(self, size: int) -> None:
        """What was kept."""
        self.push(self.memo[self._number(size)])

    def tuple_of(self, count: int | None) -> None:
        """A tuple of the last so many values, or of all since the mark."""
        if count is None:
            self.push(tuple(self._to_mark()))
            return
        values = [self.stack.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def append(self, several: bool) -> None:
        """Values into a list."""
        values = self._to_mark() if several else [self.stack.pop()]
        self._top(list).extend(values)

    def fill(self, several: bool) -> None:
        """Pairs into a dictionary."""
        values = self._to_mark() if several else [self.stack.pop() for _ in range(2)][::-1]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        if not all(isinstance(key, str | bytes | int) for key, _ in pairs):
            raise RefusedPickleError("a dictionary has a key that is no text and no number")
        self._top(dict).update(pairs)

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise RefusedPickleError(f"it fills a {type(self.stack[-1]).__name__} as if it were a {kind.__name__}")
        return self.stack[-1]

    def name(self, from_stack: bool) -> None:
        """The name of something; only those of NumPy's arrays and of bytes are known."""
        module, name = (self.stack.pop(-2), self.stack.pop()) if from_stack else (self._line(), self._line())
        if (module, name) not in {*_ARRAYS, _NDARRAY, _DTYPE, _ENCODE}:
            newer = " of protocol 4 or lower" if name == "_frombuffer" else ""  # arrays in protocol 5
            raise RefusedPickleError(f"it asks for {module}.{name}, which is no plain data{newer}")
        self.push(_Name((module, name)))

    def reduce(self) -> None:
        """An array, its type or bytes, which are written as calls."""
        arguments, called = self.stack.pop(), self.stack.pop()
        if called in _ARRAYS and type(called) is _Name and arguments[0] == _NDARRAY:
            self.push(_Array())
        elif called == _DTYPE and type(called) is _Name and arguments[0] in _BYTES:
            self.push(_Type())
        elif called == _ENCODE and type(called) is _Name and type(arguments[0]) is str and arguments[1:] == ("latin1",):
            self.push(arguments[0].encode("latin-1"))
        else:
            raise RefusedPickleError("it calls something, or has an array of other numbers than bytes")

    def build(self) -> None:
        """What an array holds."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, _Array):
            _, shape, kind, fortran, content = state
            if not isinstance(kind, _Type) or type(content) is not bytes or math.prod(shape) != len(content):
                raise RefusedPickleError("an array's numbers do not fit its shape")
            target.content = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
        elif not isinstance(target, _Type):
            raise RefusedPickleError(f"it gives a state to a {type(target).__name__}")


_CODES: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda machine: machine.skip(1),  # the protocol
    b"\x95": lambda machine: machine.skip(8),  # a frame's length
    b"(": lambda machine: machine.push(_MARK),
    b"N": lambda machine: machine.push(None),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b"}": lambda machine: machine.push({}),
    b"]": lambda machine: machine.push([]),
    b")": lambda machine: machine.push(()),
    b"K": lambda machine: machine.small_integers(),
    b"M": lambda machine: machine.integer(2),
    b"J": lambda machine: machine.integer(4, signed=True),
    b"U": lambda machine: machine.short_octets(ord("U")),
    b"T": lambda machine: machine.octets(4),
    b"C": lambda machine: machine.short_octets(ord("C")),
    b"B": lambda machine: machine.octets(4),
    b"X": lambda machine: machine.text(4),
    b"\x8c": lambda machine: machine.text(1),
    b"q": lambda machine: machine.remember(1),
    b"r": lambda machine: machine.remember(4),
    b"\x94": lambda machine: machine.remember(None),
    b"h": lambda machine: machine.recall(1),
    b"j": lambda machine: machine.recall(4),
    b"\x85": lambda machine: machine.tuple_of(1),
    b"\x86": lambda machine: machine.tuple_of(2),
    b"\x87": lambda machine: machine.tuple_of(3),
    b"t": lambda machine: machine.tuple_of(None),
    b"a": lambda machine: machine.append(several=False),
    b"e": lambda machine: machine.append(several=True),
    b"s": lambda machine: machine.fill(several=False),
    b"u": lambda machine: machine.fill(several=True),
    b"c": lambda machine: machine.name(from_stack=False),
    b"\x93": lambda machine: machine.name(from_stack=True),
    b"R": lambda machine: machine.reduce(),
    b"b": lambda machine: machine.build(),
}

_BY_NUMBER = {code[0]: action for code, action in _CODES.items()}  # a byte of bytes is a number


def _plain(value: Any) -> dict[str | bytes | int, Any]:
    """A dictionary of texts, numbers, arrays and lists of texts and numbers; nothing else is in such files."""
    if type(value) is not dict:
        raise RefusedPickleError("it holds no dictionary")
    if sum(len(item) for item in value.values() if isinstance(item, list)) > LONGEST:
        raise RefusedPickleError(f"it has lists of more than {LONGEST} items")
    return {key: _plain_item(item) for key, item in value.items()}


def _plain_item(value: Any) -> Any:
    if isinstance(value, _Array) and value.content is not None:
        return value.content
    items = value if isinstance(value, list) else [value]
    if not set(map(type, items)) <= _PLAIN:
        raise RefusedPickleError("it holds something that is no plain data")
    return value
