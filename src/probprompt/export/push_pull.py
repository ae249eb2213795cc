"""Upload models to the Hugging Face hub in one commit, and download them completely verified or not at all."""

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
    encode,
    read_record,
)
from probprompt.export.card import MARK, make_card
from probprompt.hub import TIMEOUT, asking_for, failures, without_bars
from probprompt.progress import SILENT, ProgressCallback
from probprompt.storage import check_name, sync, write_bytes, write_error

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_LARGEST_LIST = 2**24  # bytes of probprompt.json


@dataclass(frozen=True)
class Moved:
    """A model that was uploaded or downloaded."""

    repository: str
    url: str
    commit: str
    files: int
    bytes: int
    statistics: bool
    """Whether files that only further learning needs were included."""


def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    with_statistics: bool = False,
    progress: ProgressCallback = SILENT,
) -> Moved:
    """Upload a model in one commit, with a card made from its record; a missing repository is created.

    Args:
        folder: A saved classifier, a run, or the model of a run.
        repository: ``owner/name``.
        private: Create the repository for you only.
        with_statistics: Include what further learning needs: sums, or features of single images. The images cannot be
            read from them, but they do describe them.
        progress: Receives stages and notes.

    """
    _check_name(repository)
    record = read_record(Path(folder).expanduser())
    chosen = bundle(record, with_statistics)
    _check_tensors(chosen, progress)
    hub, api = _hub()
    if hub.get_token() is None:
        raise UserError(
            "push needs a token of the Hugging Face hub that may write: make one under Settings, Access Tokens, then "
            "run 'hf auth login' or set HF_TOKEN"
        )
    with _talking(hub, repository, "sent to"):
        api.create_repo(repository, private=True if private else None, exist_ok=True)
        before = api.model_info(repository, timeout=TIMEOUT)
        if private and not before.private:
            raise UserError(f"{repository} is public: make it private on the hub first, or choose another name")
        changes = _changes(hub, api, record, chosen, repository, before, progress)
        with progress.stage("sending files", 1):
            title = "Model of a run" if record.head is None else f"Version {record.head['version']}"
            done = api.create_commit(repository, changes, commit_message=title, parent_commit=before.sha or None)
            progress.advance(1)
    url = f"{api.endpoint}/{repository}"
    return Moved(repository, url, str(done.oid), len(chosen.files), chosen.bytes, with_statistics)


def pull(
    repository: str,
    folder: str | Path,
    *,
    revision: str | None = None,
    weights: str | Path | None = None,
    progress: ProgressCallback = SILENT,
) -> Moved:
    """Download a model into a new folder; if a file does not have its listed SHA-256, none is kept.

    Nothing that is downloaded is executed or unpickled.

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
        raise UserError(f"{target} is there already and not empty: name a new folder")
    hub, api = _hub()
    with _talking(hub, repository, "fetched from"):
        commit = str(api.model_info(repository, revision=revision, timeout=TIMEOUT).sha)
    with _staging(target) as place:
        listing = _read_list(hub, api, repository, commit)
        with progress.stage("fetching files", len(listing.files)):
            for path, expected in listing.files.items():
                _fetch(hub, api, repository, commit, path, place / path, expected)
                progress.advance(1)
        record = _check_complete(place, repository, listing)
        _check_tensors(bundle(record, listing.statistics), progress)
        _name_weights(record, weights, progress)
        _put_in_place(place, target)
    size = sum(expected.bytes for expected in listing.files.values())
    return Moved(repository, f"{api.endpoint}/{repository}", commit, len(listing.files), size, listing.statistics)


def _hub() -> tuple[Any, Any]:
    """Import the hub's client, and return it with its interface to the hub."""
    for name in ("huggingface_hub.errors", "huggingface_hub.utils"):
        import_module(name)
    hub: Any = import_module("huggingface_hub")
    return hub, hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="probprompt")


def _check_name(repository: str) -> None:
    if not _NAME.fullmatch(repository) or ".." in repository or "--" in repository:
        raise UserError(
            f"{repository!r} is no name of a repository: write owner/name, with letters, digits, '-', '_' and '.'"
        )


@contextmanager
def _talking(hub: Any, repository: str, doing: str) -> Iterator[None]:
    """Turn errors of the hub's client into clear messages, and hide its progress bars."""
    expected: tuple[type[Exception], ...] = (*failures(), RuntimeError, ValueError)
    try:
        with without_bars(hub.utils), asking_for("model", repository):
            yield
    except expected as problem:
        raise UserError(f"{repository} could not be {doing} the hub: {_reason(problem)}") from problem


def _reason(problem: Exception) -> str:
    cause = problem.__cause__ if isinstance(problem, RuntimeError) and problem.__cause__ else problem
    code = getattr(getattr(cause, "response", None), "status_code", None)
    hint = {
        401: "the token is not valid: run 'hf auth login' or set HF_TOKEN",
        403: "the token does not allow this: use one that may write to this owner's repositories",
        412: "somebody else changed the repository in the meantime: try again",
    }.get(code or 0, "try again; what arrived already is kept" if code is None else "try again later")
    return f"{one_line(cause)}. What to do: {hint}"


def _changes(
    hub: Any, api: Any, record: Record, chosen: Bundle, repository: str, before: Any, progress: ProgressCallback
) -> list[Any]:
    """Return the files that the commit adds, and those of an earlier push that it removes; others stay."""
    contents = {**chosen.files, LIST: encode(chosen.listing().model_dump())}
    there = {sibling.rfilename for sibling in before.siblings or ()}
    card = ""
    if CARD in there:
        card = Path(api.hf_hub_download(repository, CARD, revision=before.sha)).read_text(encoding="utf-8")
    if not card.strip() or MARK in card:
        contents[CARD] = make_card(record, repository, chosen.statistics).encode()
    else:
        progress.note(f"{repository} has a card of its own, which stays as it is")
    stale = [path for path in sorted(there) if OWN.fullmatch(path) and path not in contents]
    added = [
        hub.CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
        for path, content in contents.items()
    ]
    return [*added, *(hub.CommitOperationDelete(path) for path in stale)]


def _check_tensors(chosen: Bundle, progress: ProgressCallback) -> None:
    """Read every file of tensors, so that a corrupted one is neither uploaded nor kept."""
    with progress.stage("checking files", len(chosen.tensors)):
        for path in chosen.tensors.values():
            check_name(path)
            progress.advance(1)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Make a folder next to the target, and remove it afterwards."""
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
    """Read ``probprompt.json``; a list with files of other kinds is rejected before anything is downloaded."""
    with _talking(hub, repository, "fetched from"):
        try:
            found = Path(api.hf_hub_download(repository, LIST, revision=commit))
        except hub.errors.EntryNotFoundError as problem:
            if isinstance(problem, hub.errors.LocalEntryNotFoundError):  # the hub did not answer
                raise
            raise UserError(f"{repository} holds no model of probprompt: it has no {LIST}") from None
    try:
        if found.stat().st_size > _LARGEST_LIST:
            raise ValueError("it is too long")
        listing = json.loads(found.read_bytes())
        if listing["format"] != FORMAT:
            raise UserError(f"{repository} has format {listing['format']!r}, this version reads {FORMAT}")
        return Listing.model_validate(listing)
    except ValidationError as problem:
        wrong = problem.errors()[0]
        reason = f"{wrong['msg']} ({'.'.join(map(str, wrong['loc']))})"
    except (KeyError, TypeError, ValueError) as problem:
        reason = f"{problem!s:.200}"
    raise UserError(f"{LIST} of {repository} is damaged: {reason}. Nothing was written")


def _fetch(hub: Any, api: Any, repository: str, commit: str, path: str, target: Path, expected: FileEntry) -> None:
    """Download one file through the client's cache, which resumes interrupted downloads, and verify it."""
    for again in (False, True):  # a corrupted file in the cache is downloaded again
        with _talking(hub, repository, "fetched from"):
            cached = api.hf_hub_download(repository, path, revision=commit, force_download=again)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cached, target)
        except OSError as problem:
            raise write_error(target, problem) from problem
        found = describe(target)
        if found == expected:
            return
    raise UserError(
        f"{path} of {repository} has the SHA-256 {found.sha256} ({found.bytes} bytes), its list says "
        f"{expected.sha256} ({expected.bytes} bytes): the repository is damaged or was tampered with. "
        "Nothing was written"
    )


def _check_complete(place: Path, repository: str, listing: Listing) -> Record:
    """Read the description of the model, all of whose files must be listed."""
    record = read_record(place)
    missing = sorted(set(bundle(record, listing.statistics).files) - set(listing.files))
    if missing:
        raise UserError(f"{repository} is not complete: it lacks {shorten(missing)}. Nothing was written")
    return record


def _name_weights(record: Record, weights: str | Path | None, progress: ProgressCallback) -> None:
    """Record where this machine stores the backbone's weights, if they are a file."""
    chosen = record.backbone
    asked = chosen["weights"] not in (None, "random")
    if weights is None:
        if asked:
            progress.note(
                f"its backbone's weights are a file, {chosen['weights']!r} (SHA-256 {record.sha256}): pull with "
                "--weights FILE to say where it is on this machine"
            )
        return
    if not asked:
        raise UserError(f"the backbone {chosen['name']!r} is loaded by its name: leave --weights away")
    path = Path(weights).expanduser().resolve()
    found = weights_file.digest(path)
    if found != record.sha256:
        raise UserError(
            f"{path} has the SHA-256 {found}, the model needs {record.sha256}: name the file it was made with"
        )
    chosen["weights"] = str(path)
    write_bytes(record.described_in, encode(record.note))


def _put_in_place(place: Path, target: Path) -> None:
    try:
        for path in place.rglob("*"):
            if path.is_file():
                sync(path)
        place.replace(target)
    except OSError as problem:
        raise write_error(target, problem) from problem
