"""What ``probprompt export``, ``push`` and ``pull`` do: hand a model on."""

from pathlib import Path
from shlex import quote

from probprompt.cli.screen import Screen
from probprompt.errors import UserError
from probprompt.export.hub import Moved


def run_export(model: Path, onnx: bool, out: Path | None) -> None:
    """Write a model as an ONNX file, in the current folder and called after it unless said otherwise."""
    if not onnx:
        raise UserError("name the format of the file: probprompt export MODEL --onnx")
    from probprompt.export.onnx import BATCHES, export_onnx

    screen = Screen()
    with screen.stage("writing ONNX", 1):
        done = export_onnx(model, out or Path(f"{model.resolve().name}.onnx"))
        screen.advance(1)
    batches = ", ".join(map(str, BATCHES))
    screen.say(
        f"{done.path}: {len(done.classes)} classes, {done.bytes / 1e6:.1f} MB; answers {' and '.join(done.outputs)}"
    )
    screen.say(
        f"checked with onnxruntime on batches of {batches}: probabilities differ by {done.difference:.0e} from torch's"
    )


def run_push(model: Path, repository: str, private: bool, with_statistics: bool) -> None:
    """Send a model to the hub."""
    from probprompt.export.hub import push

    screen = Screen()
    done = push(model, repository, private=private, with_statistics=with_statistics, progress=screen)
    _tell(screen, done)
    if not done.statistics:
        screen.say("without what further learning needs: add it with --with-statistics")
    screen.say(f"to fetch it: probprompt pull {quote(repository)} FOLDER")


def run_pull(repository: str, model: Path, revision: str | None, weights: Path | None) -> None:
    """Fetch a model from the hub."""
    from probprompt.export.hub import pull

    screen = Screen()
    done = pull(repository, model, revision=revision, weights=weights, progress=screen)
    _tell(screen, done)
    further = (
        "can learn further classes" if done.statistics else "predicts, but was published without what learning needs"
    )
    screen.say(f"{model}: {further}")


def _tell(screen: Screen, done: Moved) -> None:
    screen.say(f"{done.url} at {done.commit[:12]}: {done.files} files, {done.bytes / 1e6:.1f} MB, all verified")
