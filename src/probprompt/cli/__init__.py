"""Command line: its commands, and how a process ends."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from probprompt import __version__
from probprompt.cli import cmd_audit, cmd_bench, cmd_compare, cmd_data, cmd_model, cmd_share, cmd_train
from probprompt.errors import Interrupted, UserError, is_out_of_memory

_FAILED, _WRONG_INPUT, _INTERRUPTED = 1, 2, 130  # exit codes
_OUT_OF_MEMORY = (
    "error: Out of memory. Everything saved before is intact. Close other programs, pass fewer images, or use a "
    "smaller backbone or batch size (--set evaluation_batch_size=16, --set training.batch_size=16)."
)
_REMOVED_COMMANDS = {
    **{name: f"probprompt model {name}" for name in ("forget", "rename", "history", "rollback", "push", "pull")},
    "cache": "probprompt data cache",
    "book": "python -m reproduction results",
    "reproduce": "python -m reproduction run",
}
"""Names that commands had before."""
_REMOVED_OPTIONS = {
    "learn": {"--known": "--existing", "--name": "--note"},
    "predict": {"--json": "--format json", "--csv": "--format csv", "--batch": "--batch-size"},
    "export": {"--onnx": "probprompt export MODEL"},
    "model rollback": {"--to": "probprompt model rollback MODEL VERSION"},
    "model push": {"--with-statistics": "--trainable"},
    "train": {f"--{name}-seed": f"--set seeds.{name}=N" for name in ("order", "init", "data")}
    | {"--batch": "--batch-size"},
    "compare": {"--from": "--runs", "--no-run": "--tables-only", "--on": "--ray"}
    | {f"--{name}-per-cell": f"--{name}-per-run" for name in ("gpus", "cpus")}
    | {"--book": "python -m reproduction results add RUN... --file FILE", "--page": "table.md in the folder of --out"},
    "audit": {"--all": "--all-methods", "--images": "--num-images"},
    "data get": {"--to": "--dir"},
    "data cache": {"--keep": "--max-size"},
    "bench": {"--method": "--methods", "--batch": "--batch-size", "--against": "--compare-to"}
    | {"--grow": "python -m reproduction scaling"}
    | {f"--{name}": "python -m reproduction pages" for name in ("plot", "from", "page")},
}
"""Names that options had before, by the present name of their command."""


class _Command(TyperCommand):
    """Command that lists --help in its last panel if all its options are in panels."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        panels = [getattr(param, "rich_help_panel", None) for param in self.params if param.param_type_name == "option"]
        if option and panels and None not in panels:
            option.rich_help_panel = panels[-1]
        return option


class _OrderedGroup(TyperGroup):
    """Group whose help lists commands and groups in the order of ``_PANELS``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for commands in _PANELS.values() for name in commands]


app = typer.Typer(
    name="probprompt",
    cls=_OrderedGroup,
    help="Teach an image classifier new classes one task at a time, without keeping old images."
    "\n\nNew here? Run 'probprompt demo' or 'probprompt learn my-model photos/'.",
    epilog="Exit codes: 0 success, 1 failed run or check, 2 wrong input, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PANELS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Use a model": {
        "learn": cmd_model.learn,
        "predict": cmd_model.predict,
        "evaluate": cmd_model.evaluate,
        "serve": cmd_share.serve,
        "export": cmd_share.export,
        "model": cmd_model.app,
    },
    "Run experiments": {
        "demo": cmd_train.demo,
        "train": cmd_train.train,
        "compare": cmd_compare.compare,
        "report": cmd_train.report,
        "audit": cmd_audit.audit,
        "data": cmd_data.app,
        "list": cmd_train.list_,
    },
    "Project": {"bench": cmd_bench.bench},
}
for _panel, _commands in _PANELS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, cls=_Command, rich_help_panel=_panel)(_command)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"probprompt {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _renamed(arguments: Sequence[str]) -> Iterator[str]:
    """Return a sentence with the new name for each removed name among the arguments."""
    names = [*arguments[: arguments.index("--")]] if "--" in arguments else [*arguments]
    command = " ".join(names[: 2 if names[:1] in (["model"], ["data"]) else 1])
    if new := _REMOVED_COMMANDS.get(command):
        yield f"'probprompt {command}' is now '{new}'."
        command = new.removeprefix("probprompt ")
    for option in dict.fromkeys(name.partition("=")[0] for name in names):
        if new := _REMOVED_OPTIONS.get(command, {}).get(option):
            yield f"'{option}' is now '{new}'."


def _run_app() -> None:
    """Run a command; for removed names of commands and options, report the new ones."""
    if sentences := list(_renamed(sys.argv[1:])):
        raise UserError(" ".join(sentences))
    app()


def main(run: Callable[[], object] = _run_app) -> None:
    """Run a command and exit; errors of the user are shown as a message, never as a traceback."""
    try:
        run()
    except UserError as problem:
        _exit(_WRONG_INPUT, f"error: {problem}")
    except Interrupted as stop:
        _exit(_INTERRUPTED, str(stop))
    except KeyboardInterrupt:
        _exit(_INTERRUPTED, "Interrupted.")
    except (MemoryError, RuntimeError, OSError) as problem:
        if not is_out_of_memory(problem):
            raise
        _exit(_FAILED, _OUT_OF_MEMORY)


def _exit(code: int, message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.exit(code)
