"""The program that decodes uploads, in a separate process that may crash or be killed without harm.

:mod:`probprompt.serve.uploads` starts it. It reads requests from standard input and answers on standard output until
the input ends. It may not write files or take more memory than the largest allowed image needs.
"""

import io
import struct
import sys
from typing import IO

from PIL import Image

from probprompt.data.images import UnreadableImageError, read_image

REQUEST = struct.Struct(">BII")
"""What is wanted (a :data:`PIXELS` or :data:`PNG`), the short side (0: as it is), how many bytes follow."""
ANSWER = struct.Struct(">BIII")
"""What came out (as asked for, or :data:`REFUSED`), width, height, how many bytes follow."""
PIXELS, PNG, REFUSED = 0, 1, 2
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "HEIF")
"""Formats of photographs; no others, since some of Pillow's start programs or are hardly ever tested."""
LONGEST = 100
"""A picture's long side over its short one, at most: the long side is not reduced."""
BASE_MEMORY, MEMORY_PER_PIXEL = 768 * 2**20, 40
"""What the process takes by itself, and the most that reading a pixel of any format takes."""


def main(arguments: list[str]) -> None:
    """Answer until the input ends; the argument is how many pixels an image may have."""
    most = int(arguments[0])
    Image.init()
    Image.MAX_IMAGE_PIXELS = most
    confine(most)
    serve(sys.stdin.buffer, sys.stdout.buffer)


def confine(pixels: int) -> None:
    """Give up what decoding does not need, where the system can take it away."""
    try:
        import resource
    except ImportError:  # no such limits on this system: the process is still one of its own
        return
    memory = BASE_MEMORY + MEMORY_PER_PIXEL * pixels
    for name, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        _, hardest = resource.getrlimit(name)
        allowed = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
        resource.setrlimit(name, (allowed, allowed))


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer one request after the other."""
    while len(header := requests.read(REQUEST.size)) == REQUEST.size:
        wanted, short_side, size = REQUEST.unpack(header)
        try:
            kind, width, height, content = decode(requests.read(size), wanted, short_side)
        except UnreadableImageError as problem:
            kind, width, height, content = REFUSED, 0, 0, str(problem).encode()
        answers.write(ANSWER.pack(kind, width, height, len(content)))
        answers.write(content)
        answers.flush()


def decode(data: bytes, wanted: int, short_side: int) -> tuple[int, int, int, bytes]:
    """Decode one upload: the answer's kind, its width and height, and its bytes."""
    pixels = read_image(io.BytesIO(data), short_side or None, list(FORMATS))
    height, width = pixels.shape[:2]
    if max(width, height) > LONGEST * min(width, height):
        raise UnreadableImageError(f"{width} x {height} pixels: one side is more than {LONGEST} times the other")
    if wanted == PIXELS:
        return wanted, width, height, pixels.tobytes()
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG", compress_level=1)
    return wanted, width, height, written.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])
