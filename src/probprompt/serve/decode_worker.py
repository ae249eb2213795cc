"""Program that decodes uploads in a separate process, which may crash without harm.

:mod:`probprompt.serve.uploads` starts it. It reads requests from standard input and answers on standard output until
the input ends. It cannot write files, and its memory is limited to what the largest allowed image needs.
"""

import io
import struct
import sys
from typing import IO

from PIL import Image

from probprompt.data.images import UnreadableImageError, read_image

REQUEST = struct.Struct(">BII")
"""Requested kind (:data:`PIXELS` or :data:`PNG`), short side (0: unchanged), number of bytes that follow."""
ANSWER = struct.Struct(">BIII")
"""Kind (as requested, or :data:`REFUSED`), width, height, number of bytes that follow."""
PIXELS, PNG, REFUSED = 0, 1, 2
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "HEIF")
"""Formats of photos; some others start programs or are hardly tested."""
LONGEST = 100
"""Largest ratio of an image's sides, since only the short side is reduced."""
BASE_MEMORY, MEMORY_PER_PIXEL = 768 * 2**20, 40
"""Bytes of the process itself, and at most per pixel of any format."""


def main(arguments: list[str]) -> None:
    """Answer until the input ends; the argument is the largest number of pixels."""
    most = int(arguments[0])
    Image.init()
    Image.MAX_IMAGE_PIXELS = most
    confine(most)
    serve(sys.stdin.buffer, sys.stdout.buffer)


def confine(pixels: int) -> None:
    """Drop rights that decoding does not need, if the system supports it."""
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    memory = BASE_MEMORY + MEMORY_PER_PIXEL * pixels
    for name, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        _, hardest = resource.getrlimit(name)
        allowed = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
        resource.setrlimit(name, (allowed, allowed))


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests one by one."""
    while len(header := requests.read(REQUEST.size)) == REQUEST.size:
        requested, short_side, size = REQUEST.unpack(header)
        try:
            kind, width, height, content = decode(requests.read(size), requested, short_side)
        except UnreadableImageError as problem:
            kind, width, height, content = REFUSED, 0, 0, str(problem).encode()
        answers.write(ANSWER.pack(kind, width, height, len(content)))
        answers.write(content)
        answers.flush()


def decode(data: bytes, requested: int, short_side: int) -> tuple[int, int, int, bytes]:
    """Decode one upload; return kind, width, height and bytes."""
    pixels = read_image(io.BytesIO(data), short_side or None, list(FORMATS))
    height, width = pixels.shape[:2]
    if max(width, height) > LONGEST * min(width, height):
        raise UnreadableImageError(
            f"Image of {width}x{height} pixels. One side is more than {LONGEST} times the other."
        )
    if requested == PIXELS:
        return requested, width, height, pixels.tobytes()
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG", compress_level=1)
    return requested, width, height, written.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])
