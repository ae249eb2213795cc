"""Upload of models to the Hugging Face Hub in one commit, and verified download."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from probprompt.backbones import weights_file
from probprompt.errors import UserError, one_line, shorten
from probprompt.export.bundle import (
    CARD,
    FORMAT,
    LIST,
    OWN,
    Bundle,
    FileEntry,
    Listing,
    Record,
    bundle,
    describe,
    read_record,
)
from probprompt.export.card import MARKER, make_card
from probprompt.hub import TIMEOUT, failures, repository_errors, without_bars
from probprompt.progress import SILENT, ProgressCallback
from probprompt.storage import check_name, encode_json, sync, write_error, write_json

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_LARGEST_LIST = 2**24  # bytes of probprompt.json
_REMEDIES = {
    401: "The token is invalid. Run 'hf auth login' or set HF_TOKEN.",
    403: "The token lacks permission. Use one with write access to this owner's repositories.",
    412: "The repository changed in the meantime. Try again.",
}


@dataclass(frozen=True)
class TransferReport:
    """The result of an upload or download."""

    repository: str
    url: str
    commit: str
    files: int
    bytes: int
    statistics: bool  # whether files for further learning were included


def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    with_statistics: bool = False,
    progress: ProgressCallback = SILENT,
) -> TransferReport:
    """Upload a model with a model card in one commit; create a missing repository.

    Args:
        folder: A saved classifier, a run, or the model of a run.
        repository: ``owner/name``.
        private: Create a private repository.
        with_statistics: Include the statistics needed to teach the model more classes: class statistics, or features of
            single images. They describe the images but cannot be turned back into them.
        progress: Receives stages and notes.

    """
    _check_name(repository)
    record = read_record(Path(folder).expanduser())
    chosen = bundle(record, with_statistics)
    _check_tensors(chosen, progress)
    hub, api = _hub()
    if hub.get_token() is None:
        raise UserError(
            "Pushing needs a Hugging Face token with write access. Create one under Settings, Access Tokens, then run "
            "'hf auth login' or set HF_TOKEN."
        )
    with _hub_errors(hub, repository, "upload", "to"):
        api.create_repo(repository, private=True if private else None, exist_ok=True)
        before = api.model_info(repository, timeout=TIMEOUT)
        if private and not before.private:
            raise UserError(f"{repository} is public. Make it private on the Hub first, or choose another name.")
        changes = _changes(hub, api, record, chosen, repository, before, progress)
        with progress.stage("uploading files", 1):
            title = "Model of a run" if record.head is None else f"Version {record.head['version']}"
            done = api.create_commit(repository, changes, commit_message=title, parent_commit=before.sha or None)
            progress.advance(1)
    url = f"{api.endpoint}/{repository}"
    return TransferReport(repository, url, str(done.oid), len(chosen.files), chosen.bytes, with_statistics)


def pull(
    repository: str,
    folder: str | Path,
    *,
    revision: str | None = None,
    weights: str | Path | None = None,
    progress: ProgressCallback = SILENT,
) -> TransferReport:
    """Download a model to a new folder; discard all files if a SHA-256 does not match.

    No downloaded file is executed or unpickled.

    Args:
        repository: ``owner/name``.
        folder: A new or empty folder.
        revision: A branch, tag or commit.
        weights: The backbone's weights on this machine, if the model was made with a file.
        progress: Receives stages and notes.

    """
    _check_name(repository)
    target = Path(folder).expanduser()
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise UserError(f"{target} is not empty. Pass a new folder.")
    hub, api = _hub()
    with _hub_errors(hub, repository, "download", "from"):
        commit = str(api.model_info(repository, revision=revision, timeout=TIMEOUT).sha)
    with _staging(target) as place:
        listing = _read_list(hub, api, repository, commit)
        with progress.stage("downloading files", len(listing.files)):
            for path, expected in listing.files.items():
                _download(hub, api, repository, commit, path, place / path, expected)
                progress.advance(1)
        record = _check_complete(place, repository, listing)
        _check_tensors(bundle(record, listing.statistics), progress)
        _record_weights(record, weights, progress)
        _move(place, target)
    size = sum(expected.bytes for expected in listing.files.values())
    return TransferReport(
        repository, f"{api.endpoint}/{repository}", commit, len(listing.files), size, listing.statistics
    )


def _hub() -> tuple[Any, Any]:
    for name in ("huggingface_hub.errors", "huggingface_hub.utils"):
        import_module(name)
    hub: Any = import_module("huggingface_hub")
    return hub, hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="probprompt")


def _check_name(repository: str) -> None:
    if not _NAME.fullmatch(repository) or ".." in repository or "--" in repository:
        raise UserError(
            f"Invalid repository {repository!r}. Expected owner/name with letters, digits, '-', '_' or '.'."
        )


@contextmanager
def _hub_errors(hub: Any, repository: str, verb: str, preposition: str) -> Iterator[None]:
    expected: tuple[type[Exception], ...] = (*failures(), RuntimeError, ValueError)
    try:
        with without_bars(hub.utils), repository_errors("model", repository):
            yield
    except expected as problem:
        cause = problem.__cause__ if isinstance(problem, RuntimeError) and problem.__cause__ else problem
        code = getattr(getattr(cause, "response", None), "status_code", None)
        default = "Try again; downloaded files are kept." if code is None else "Try again later."
        remedy = _REMEDIES.get(code or 0, default)
        reason = f"Could not {verb} {repository} {preposition} the Hub: {one_line(cause)}."
        raise UserError(f"{reason} {remedy}") from problem


def _changes(
    hub: Any, api: Any, record: Record, chosen: Bundle, repository: str, before: Any, progress: ProgressCallback
) -> list[Any]:
    """Return the files to add, and stale files of an earlier push to remove."""
    contents = {**chosen.files, LIST: encode_json(chosen.listing().model_dump())}
    existing = {sibling.rfilename for sibling in before.siblings or ()}
    card = ""
    if CARD in existing:
        card = Path(api.hf_hub_download(repository, CARD, revision=before.sha)).read_text(encoding="utf-8")
    if not card.strip() or MARKER in card:
        contents[CARD] = make_card(record, repository, chosen.statistics).encode()
    else:
        progress.note(f"Kept the custom model card of {repository}.")
    stale = [path for path in sorted(existing) if OWN.fullmatch(path) and path not in contents]
    added = [
        hub.CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
        for path, content in contents.items()
    ]
    return [*added, *(hub.CommitOperationDelete(path) for path in stale)]


def _check_tensors(chosen: Bundle, progress: ProgressCallback) -> None:
    with progress.stage("checking files", len(chosen.tensors)):
        for path in chosen.tensors.values():
            check_name(path)
            progress.advance(1)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    place = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        place.mkdir(parents=True)
    except OSError as problem:
        raise write_error(target, problem) from problem
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _read_list(hub: Any, api: Any, repository: str, commit: str) -> Listing:
    """Read ``probprompt.json``, which may list only files of a model."""
    with _hub_errors(hub, repository, "download", "from"):
        try:
            file = Path(api.hf_hub_download(repository, LIST, revision=commit))
        except hub.errors.EntryNotFoundError as problem:
            if isinstance(problem, hub.errors.LocalEntryNotFoundError):  # the Hub did not answer
                raise
            raise UserError(f"{repository} is not a probprompt model: it has no {LIST}.") from None
    try:
        if file.stat().st_size > _LARGEST_LIST:
            raise ValueError("it is too long")
        listing = json.loads(file.read_bytes())
        if listing["format"] != FORMAT:
            got = f"format {listing['format']!r}, but this version reads {FORMAT}"
            raise UserError(f"{repository} has {got}. Install another version of probprompt.")
        return Listing.model_validate(listing)
    except ValidationError as problem:
        first = problem.errors()[0]
        reason = f"{first['msg']} ({'.'.join(map(str, first['loc']))})"
    except (KeyError, TypeError, ValueError) as problem:
        reason = f"{problem!s:.200}"
    raise UserError(f"{LIST} of {repository} is corrupted: {reason}. Nothing was written.")


def _download(hub: Any, api: Any, repository: str, commit: str, path: str, target: Path, expected: FileEntry) -> None:
    for again in (False, True):  # a corrupted file in the client's cache is downloaded again
        with _hub_errors(hub, repository, "download", "from"):
            cached = api.hf_hub_download(repository, path, revision=commit, force_download=again)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cached, target)
        except OSError as problem:
            raise write_error(target, problem) from problem
        received = describe(target)
        if received == expected:
            return
    raise UserError(
        f"{path} of {repository} is corrupted or was changed: expected SHA-256 {expected.sha256} ({expected.bytes} "
        f"bytes), got {received.sha256} ({received.bytes} bytes). Nothing was written."
    )


def _check_complete(place: Path, repository: str, listing: Listing) -> Record:
    record = read_record(place)
    missing = sorted(set(bundle(record, listing.statistics).files) - set(listing.files))
    if missing:
        raise UserError(f"{repository} is incomplete: it lacks {shorten(missing)}. Nothing was written.")
    return record


def _record_weights(record: Record, weights: str | Path | None, progress: ProgressCallback) -> None:
    backbone = record.backbone
    needs_file = backbone["weights"] not in (None, "random")
    if weights is None:
        if needs_file:
            file = f"{backbone['weights']!r} (SHA-256 {record.sha256})"
            progress.note(f"The backbone's weights are a file, {file}. Pull again with --weights FILE.")
        return
    if not needs_file:
        raise UserError(f"The backbone {backbone['name']!r} is loaded by name. Remove --weights.")
    path = Path(weights).expanduser().resolve()
    sha256 = weights_file.digest(path)
    if sha256 != record.sha256:
        mismatch = f"SHA-256 mismatch (expected {record.sha256}, got {sha256})"
        raise UserError(f"{path}: {mismatch}. Pass the weights this model was trained with.")
    backbone["weights"] = str(path)
    write_json(record.described_in, record.note)


def _move(place: Path, target: Path) -> None:
    try:
        for path in place.rglob("*"):
            if path.is_file():
                sync(path)
        place.replace(target)
    except OSError as problem:
        raise write_error(target, problem) from problem
