"""The command line."""

import sys

_INTERRUPTED = 130  # the exit code of a process that was interrupted
_OUT_OF_MEMORY = (
    "error: there is not enough memory. What was saved before is as it was. Close other programs, give fewer images at "
    "a time, or use a smaller backbone or batch (--set evaluation_batch=16, --set training.batch=16)"
)


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """The user stopped a command; the message says how to go on."""


def main() -> None:
    """Run a command; a user's mistake is told in words and with exit code 2, never as a traceback."""
    from probprompt.errors import UserError, says_out_of_memory

    try:
        from probprompt.cli.app import app

        app()
    except UserError as problem:
        _complain(f"error: {problem}")
        sys.exit(2)
    except Interrupted as stop:
        _complain(str(stop))
        sys.exit(_INTERRUPTED)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(_INTERRUPTED)
    except (MemoryError, RuntimeError, OSError) as problem:
        if not says_out_of_memory(problem):
            raise
        _complain(_OUT_OF_MEMORY)
        sys.exit(1)


def _complain(text: str) -> None:
    sys.stderr.write(text + "\n")
