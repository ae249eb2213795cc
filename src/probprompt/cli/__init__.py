"""The command line."""

import sys
from collections.abc import Callable

_INTERRUPTED = 130  # the exit code of a process that was interrupted
_OUT_OF_MEMORY = (
    "error: there is not enough memory. What was saved before is as it was. Close other programs, give fewer images at "
    "a time, or use a smaller backbone or batch (--set evaluation_batch=16, --set training.batch=16)"
)

_MOVED = {"book": "results", "reproduce": "run", "bench --grow": "scaling"}
_MOVED |= dict.fromkeys(("bench --plot", "bench --from", "bench --page"), "pages")


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """The user stopped a command; the message says how to go on."""


def _run_app() -> None:
    """Run the program's own commands; one that moved out of the package is named with its new place."""
    from probprompt.cli.app import app
    from probprompt.errors import UserError

    command, *options = (*sys.argv[1:], "")
    for old in (command, *(f"{command} {option.partition('=')[0]}" for option in options)):
        if old in _MOVED:
            new = f"python -m reproduction {_MOVED[old]}"
            raise UserError(f"'probprompt {old}' is no longer part of the package. In a checkout, use '{new}'.")
    app()


def main(app: Callable[[], object] = _run_app) -> None:
    """Run a command; a user's mistake is told in words and with exit code 2, never as a traceback."""
    from probprompt.errors import UserError, says_out_of_memory

    try:
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
