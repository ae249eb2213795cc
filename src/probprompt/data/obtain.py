"""A published dataset brought onto this machine: fetched, verified, unpacked and put in its place at once."""

import json
import secrets
import shutil
from pathlib import Path

from probprompt.data.archives import make_room, unpack, unpacked_size
from probprompt.data.datasets import Dataset, data_folder
from probprompt.data.download import SLACK, Progress, download, verify
from probprompt.data.layouts import LISTED, find_lists
from probprompt.data.sources import Source
from probprompt.errors import UserError

NOTE = "source.json"
"""The file beside the images that says where they came from, and by which hashes they were known."""
_ROOM = 2.5  # times the size of an archive: itself and its files


def get(
    kind: type[Dataset], to: Path | None, url: str | None, file: Path | None, watch: Progress, pause: float = 1.0
) -> Dataset:
    """Put a dataset into ``to``/its name, from its publisher, a mirror (``url``) or an archive that is here (``file``).

    What is there already is left as it is.
    """
    if url and file:
        raise UserError("--url and --file exclude each other: name a mirror, or an archive that is on this machine")
    home = (to.expanduser().absolute() if to else data_folder()).resolve()
    target = home / kind.name
    there = kind(target)
    found = there.recognise()
    if found is None:
        _refuse_others(target, kind)
        _bring(kind, home, target, url, file, watch, pause)
        return there
    watch.note(f"{kind.name} is in {found[0]} already")
    if found[1] is LISTED and find_lists(found[0]) is None:
        for source in kind.sources[1:]:
            _fetch_beside(source, target, watch, pause, file)
    return there


def _refuse_others(target: Path, kind: type[Dataset]) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target} exists and does not look like {kind.name}: move it away, or choose another folder with --to"
        )


def _bring(
    kind: type[Dataset], home: Path, target: Path, url: str | None, file: Path | None, watch: Progress, pause: float
) -> None:
    """Fetch and unpack beside the target, then put everything in its place with one rename."""
    main, *others = kind.sources
    part = home / f".{kind.name}.{secrets.token_hex(4)}"
    try:
        part.mkdir(parents=True)
        notes = [_fetch_beside(source, part, watch, pause, file) for source in others]  # small: trouble shows early
        archive, known = _archive(main, home, url, file, watch, pause)
        _unpack(archive, part, watch)
        notes.insert(0, {"file": main.file, "from": str(file) if file else url or main.url, **known})
        (part / NOTE).write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
        if kind(part).recognise() is None:
            raise UserError(f"{archive} holds nothing that looks like {kind.name}: name the right archive")
        if target.exists():
            target.rmdir()  # empty, as was seen before
        part.rename(target)
        if file is None:
            archive.unlink()
    except OSError as problem:
        raise UserError(f"{kind.name} cannot be written to {home}: {problem.strerror or problem}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _archive(
    source: Source, home: Path, url: str | None, file: Path | None, watch: Progress, pause: float
) -> tuple[Path, dict[str, str]]:
    """The archive on this machine, and its hashes."""
    if file is not None and not file.is_file():
        raise UserError(f"{file} is no file: name the archive {source.file}")
    archive = file or home / source.file
    if archive.exists():
        return archive, _checked(archive, source, watch)
    download(url or source.url, archive, watch, pause, _ROOM)
    try:
        return archive, _checked(archive, source, watch)
    except UserError as problem:
        archive.unlink()
        raise UserError(f"{problem}. It was removed: try again, or name a mirror with --url") from None


def _checked(path: Path, source: Source, watch: Progress) -> dict[str, str]:
    known = verify(path, source, watch)
    if not source.hashed:
        watch.note(f"no hash of {source.file} was published; this one has sha256 {known['sha256']}")
    return known


def _unpack(archive: Path, part: Path, watch: Progress) -> None:
    size = unpacked_size(archive)
    make_room(part.parent, size + SLACK, f"unpacking {archive.name}")
    with watch.transfer("unpacking", size):
        unpack(archive, part, watch.advance)


def _fetch_beside(source: Source, folder: Path, watch: Progress, pause: float, file: Path | None) -> dict[str, str]:
    """A file that lies with the images as it is: from its publisher, or from beside the archive that is here."""
    path = folder / source.file
    waiting = path.with_name(f".{path.name}")  # not to be mistaken for the file before it is verified
    near = file.parent / source.file if file else None
    try:
        if near and near.is_file():
            shutil.copyfile(near, waiting)
        else:
            download(source.url, waiting, watch, pause)
        known = verify(waiting, source, watch)
        waiting.replace(path)
    finally:
        waiting.unlink(missing_ok=True)
    return {"file": source.file, "from": str(near) if near and near.is_file() else source.url, **known}
