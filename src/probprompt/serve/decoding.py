"""Uploads become pixels in processes of their own, which are replaced when they die or take too long."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

import probprompt
from probprompt.data.images import Pixels
from probprompt.serve.decoder import ANSWER, PIXELS, PNG, REFUSED, REQUEST

_BUFFER = 2**20  # bytes that are taken from a process at once


class RefusedImageError(Exception):
    """An upload that is no image that can be decoded within the limits; the message says why."""


class Decoders:
    """Several decoding processes, each started when it is first needed."""

    def __init__(self, count: int, pixels: int, short_side: int | None, seconds: float = 20.0) -> None:
        self.count, self.short_side, self.seconds = count, short_side, seconds
        self._free: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()  # the one used last is warm
        self._all = [_Process(pixels) for _ in range(count)]
        for process in self._all:
            self._free.put_nowait(process)
        self.deaths = 0

    async def pixels_of(self, data: bytes) -> Pixels:
        """Decode an upload to RGB, (H, W, 3), its short side reduced."""
        width, height, content = await self._ask(PIXELS, data)
        return np.frombuffer(content, np.uint8).reshape(height, width, 3)

    async def png_of(self, data: bytes) -> bytes:
        """The same pixels as a PNG file: what is kept of an upload."""
        return (await self._ask(PNG, data))[2]

    async def _ask(self, wanted: int, data: bytes) -> tuple[int, int, bytes]:
        process = await self._free.get()
        try:
            async with asyncio.timeout(self.seconds):
                kind, width, height, content = await process.ask(wanted, self.short_side or 0, data)
        except TimeoutError:
            self.deaths += 1
            await process.kill()
            raise RefusedImageError(f"it could not be decoded within {self.seconds:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            self.deaths += 1
            await process.kill()
            raise RefusedImageError("decoding it failed: the file is damaged or made to do harm") from None
        except asyncio.CancelledError:
            await process.kill()  # it may be in the middle of an answer that nobody reads
            raise
        finally:
            self._free.put_nowait(process)
        if kind == REFUSED:
            raise RefusedImageError(content.decode(errors="replace"))
        return width, height, content

    async def start(self) -> None:
        """Start all processes now, so that the first upload need not wait."""
        for process in self._all:
            await process.start()

    async def close(self) -> None:
        """End all processes."""
        for process in self._all:
            await process.kill()


class _Process:
    """One decoding process, and the pipes to it."""

    def __init__(self, pixels: int) -> None:
        self._pixels = pixels
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> asyncio.subprocess.Process:
        """The process; a new one where there is none or it has died."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "probprompt.serve.decoder", str(self._pixels)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,  # an interrupt at the terminal is the service's to handle
                limit=_BUFFER,
            )
        return self._process

    async def ask(self, wanted: int, short_side: int, data: bytes) -> tuple[int, int, int, bytes]:
        """Send one upload and wait for what became of it."""
        process = await self.start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(REQUEST.pack(wanted, short_side, len(data)) + data)
        await process.stdin.drain()
        kind, width, height, size = ANSWER.unpack(await process.stdout.readexactly(ANSWER.size))
        return kind, width, height, await process.stdout.readexactly(size)

    async def kill(self) -> None:
        """End the process, whatever it is doing."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        if process is not None:
            await process.wait()


def child_environment() -> dict[str, str]:
    """The environment of a process that this one starts: the same package, and one thread."""
    home = str(Path(probprompt.__file__).parent.parent)
    paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
