"""The command line."""

import sys


def main() -> None:
    """Run a command; a user's mistake is told in words and with exit code 2, never as a traceback."""
    from probprompt.errors import UserError

    try:
        from probprompt.cli.app import app

        app()
    except UserError as problem:
        _complain(f"error: {problem}")
        sys.exit(2)
    except KeyboardInterrupt:
        _complain("interrupted; a run goes on from its last checkpoint with: probprompt train --resume RUN")
        sys.exit(130)


def _complain(text: str) -> None:
    sys.stderr.write(text + "\n")
