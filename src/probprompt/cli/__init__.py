"""The command line: its commands, and how a process ends."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from probprompt import __version__
from probprompt.cli import cmd_audit, cmd_bench, cmd_compare, cmd_data, cmd_model, cmd_share, cmd_train
from probprompt.errors import Interrupted, UserError, is_out_of_memory

_INTERRUPTED = 130  # the exit code of a process that was interrupted
_OUT_OF_MEMORY = (
    "error: there is not enough memory. What was saved before is as it was. Close other programs, give fewer images at "
    "a time, or use a smaller backbone or batch (--set evaluation_batch_size=16, --set training.batch_size=16)"
)
_MOVED = {"book": "results", "reproduce": "run", "bench --grow": "scaling"}
_MOVED |= dict.fromkeys(("bench --plot", "bench --from", "bench --page"), "pages")

app = typer.Typer(
    name="probprompt",
    help="Teach a frozen vision transformer new classes, one task after another, without keeping old images.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(cmd_train.demo, cmd_train.train, cmd_compare.compare, cmd_audit.audit, cmd_bench.bench, cmd_train.cache),
    *(cmd_share.export, cmd_share.push, cmd_share.pull, cmd_train.list_, cmd_share.serve, cmd_train.report),
    *(cmd_model.learn, cmd_model.predict, cmd_model.evaluate, cmd_model.forget, cmd_model.rename),
    *(cmd_model.history, cmd_model.rollback),
)
"""In the order of the help."""
for _command in _COMMANDS:
    app.command(_command.__name__.rstrip("_"))(_command)
app.add_typer(cmd_data.app, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"probprompt {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _run_app() -> None:
    """Run the program's own commands; one that moved out of the package is named with its new place."""
    command, *options = (*sys.argv[1:], "")
    for old in (command, *(f"{command} {option.partition('=')[0]}" for option in options)):
        if old in _MOVED:
            new = f"python -m reproduction {_MOVED[old]}"
            raise UserError(f"'probprompt {old}' is no longer part of the package. In a checkout, use '{new}'.")
    app()


def main(run: Callable[[], object] = _run_app) -> None:
    """Run a command; a user's error is shown as a message with exit code 2, never as a traceback."""
    try:
        run()
    except UserError as problem:
        _exit(2, f"error: {problem}")
    except Interrupted as stop:
        _exit(_INTERRUPTED, str(stop))
    except KeyboardInterrupt:
        _exit(_INTERRUPTED, "interrupted")
    except (MemoryError, RuntimeError, OSError) as problem:
        if not is_out_of_memory(problem):
            raise
        _exit(1, _OUT_OF_MEMORY)


def _exit(code: int, message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.exit(code)
