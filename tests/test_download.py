"""Datasets brought onto this machine, by a real server on the loopback: cut, resumed, verified, unpacked safely."""

import errno
import hashlib
import io
import json
import os
import shutil
import socket
import tarfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from probprompt.data import download, layouts
from probprompt.data.download import check_hash, get, unpack
from probprompt.data.published import Dataset, Figures, Source
from probprompt.errors import UserError
from probprompt.progress import ProgressCallback

CONTENT = bytes(range(256)) * 4000


class Watch(ProgressCallback):
    """Records what is reported."""

    def __init__(self) -> None:
        self.moved = 0
        self.begun: list[tuple[str, int | None, int]] = []
        self.done: list[str] = []
        """Transfers that came to their end."""
        self.notes: list[str] = []

    @contextmanager
    def transfer(self, description: str, total: int | None, done: int = 0) -> Iterator[None]:
        self.begun.append((description, total, done))
        yield
        self.done.append(description)

    def advance(self, steps: int) -> None:
        self.moved += steps

    def note(self, text: str) -> None:
        self.notes.append(text)


class Request(NamedTuple):
    path: str
    range: str | None
    version: str | None


class Server:
    """Serves files, with or without ranges, and closes connections on request."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"/data.bin": CONTENT}
        self.requests: list[Request] = []
        self.cuts: list[int] = []
        """After how many bytes the next answers end."""
        self.failures: list[int] = []
        """The codes of the next answers."""
        self.ranges = self.length = True
        self.tag: str | None = '"one"'
        self.redirect: str | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.web.server_address[1]}"

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        wanted, version = to.headers.get("Range"), to.headers.get("If-Range")
        self.requests.append(Request(to.path, wanted, version))
        content = self.files.get(to.path)
        if self.failures or content is None:
            to.send_error(self.failures.pop(0) if self.failures else 404)
            return
        start = 0
        if wanted and self.ranges and version in (None, self.tag):
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                to.send_error(416)
                return
        to.send_response(302 if self.redirect else 206 if start else 200)
        headers = {
            "Location": self.redirect,
            "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}" if start else None,
            "ETag": self.tag,
            "Content-Length": str(len(content) - start) if self.length else None,
        }
        for name, value in headers.items():
            if value is not None:
                to.send_header(name, value)
        to.end_headers()
        end = start + self.cuts.pop(0) if self.cuts else len(content)
        to.wfile.write(content[start:end])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE", 0.0)
    made = Server()
    thread = threading.Thread(target=made.web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.web.shutdown()
    thread.join()
    made.web.server_close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "data.bin"


def fetch(server: Server, target: Path, expected: bytes = CONTENT) -> Watch:
    watch = Watch()
    download.download(f"{server.url}/data.bin", target, watch)
    assert target.read_bytes() == expected
    assert [path.name for path in target.parent.iterdir()] == ["data.bin"], "nothing else is left"
    return watch


def fetch_part(server: Server, target: Path) -> None:
    """A command that is not patient, on a line that is cut."""
    server.cuts = [400_000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "ATTEMPTS", 1)
        with pytest.raises(UserError, match=r"0.4 MB are kept; the same command"):
            fetch(server, target)
    assert not target.exists()


# Downloads


@pytest.mark.parametrize("length", [True, False])
def test_a_file_is_fetched_whole(server: Server, target: Path, length: bool) -> None:
    server.length = length
    watch = fetch(server, target)
    assert watch.moved == len(CONTENT) and watch.begun == [("data.bin", len(CONTENT) if length else None, 0)]


def test_a_cut_connection_is_taken_up_where_it_ended(server: Server, target: Path) -> None:
    server.cuts = [300_000, 200_000]
    watch = fetch(server, target)
    assert [request.range for request in server.requests] == [None, "bytes=300000-", "bytes=500000-"]
    assert [request.version for request in server.requests] == [None, '"one"', '"one"']
    assert watch.moved == len(CONTENT), "no byte came twice"
    assert [done for _, _, done in watch.begun] == [0, 300_000, 500_000]
    assert any("0.3 MB" in note for note in watch.notes)
    assert watch.done == ["data.bin"], "what was cut is not done"


@pytest.mark.parametrize("tag", ['"one"', None, 'W/"weak"'])
@pytest.mark.parametrize("ranges", [True, False])
def test_what_an_earlier_command_fetched_is_used_where_the_server_can(
    server: Server, target: Path, tag: str | None, ranges: bool
) -> None:
    server.ranges, server.tag = ranges, tag
    fetch_part(server, target)
    fetch(server, target)
    assert server.requests[-1] == Request("/data.bin", "bytes=400000-", '"one"' if tag == '"one"' else None)


@pytest.mark.parametrize("tag", ['"two"', None])
@pytest.mark.parametrize("content", [CONTENT[::-1] + b"more", b"short"])
def test_parts_of_two_files_are_never_joined(server: Server, target: Path, tag: str | None, content: bytes) -> None:
    server.tag = '"one"' if tag else None
    fetch_part(server, target)
    server.tag, server.files["/data.bin"] = tag, content
    fetch(server, target, content)


def test_a_server_that_is_busy_is_asked_again_and_one_that_has_nothing_is_not(server: Server, target: Path) -> None:
    server.failures = [503, 500]
    fetch(server, target)
    assert len(server.requests) == 3
    server.failures = [404]
    with pytest.raises(UserError, match=r"404 Not Found.*--url"):
        fetch(server, target.with_name("other"))
    assert len(server.requests) == 4 and not target.with_name("other").exists()


UNREACHABLE = [
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    OSError(errno.ENETUNREACH, "Network is unreachable"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
]


def failing(monkeypatch: pytest.MonkeyPatch, *problems: OSError | None) -> list[float]:
    """Connections fail like this, one after the other, where there is a problem; returns how long was waited."""
    opener, left, waited = urllib.request.OpenerDirector.open, list(problems), list[float]()

    def connect(self: urllib.request.OpenerDirector, *arguments: Any, **options: Any) -> Any:
        if left and (problem := left.pop(0)):
            raise urllib.error.URLError(problem)
        return opener(self, *arguments, **options)

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", connect)
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


@pytest.mark.parametrize("problem", UNREACHABLE, ids=lambda problem: problem.strerror)
def test_a_network_that_is_lost_is_waited_for_and_one_that_was_never_there_is_not(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch, problem: OSError
) -> None:
    with monkeypatch.context() as patch:
        waited = failing(patch, problem)
        with pytest.raises(UserError, match=rf"\({problem.strerror}\).*Nothing was downloaded.*network"):
            fetch(server, target)
    assert not waited and not server.requests, "asked once"
    server.cuts = [300_000]
    waited = failing(monkeypatch, None, problem, problem)
    watch = fetch(server, target)
    assert len(watch.notes) == len(waited) == 3
    assert [request.range for request in server.requests] == [None, "bytes=300000-"]


def test_a_slow_connection_is_tried_again(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, TimeoutError("timed out"))
    assert fetch(server, target).notes == ["Interrupted after 0.0 MB (timed out). Resuming."]


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "cifar100", ""])
def test_only_web_addresses_are_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="https://"):
        download.download(url, tmp_path / "x", Watch())


def test_redirects_are_followed_to_the_web_alone(server: Server, target: Path) -> None:
    server.redirect = "ftp://127.0.0.1/data.bin"
    with pytest.raises(UserError, match=r"ftp://127.0.0.1/data.bin.*--url"):
        fetch(server, target)
    safe, request = download._SafeRedirects(), urllib.request.Request("https://example.org/a")
    with pytest.raises(UserError, match=r"less secure.*--url"):
        safe.redirect_request(request, io.BytesIO(), 302, "", Message(), "http://example.org/a")
    assert safe.redirect_request(request, io.BytesIO(), 302, "", Message(), "https://example.org/b") is not None


def test_a_disk_without_room_is_told_before_anything_is_moved(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(target.parents[1])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(UserError, match=r"needs 0.07 GB in .* 0.00 GB are free.*--dir"):
        fetch(server, target)


def test_the_published_hash_decides(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(CONTENT)
    hashes = {"md5": hashlib.md5(CONTENT).hexdigest(), "sha256": hashlib.sha256(CONTENT).hexdigest()}
    for algorithm in ("md5", "sha256"):
        assert check_hash(path, Source("a", algorithm, hashes[algorithm]), Watch()) == hashes
        with pytest.raises(UserError, match=f"published a: {algorithm} .*0000, got {hashes[algorithm]}"):
            check_hash(path, Source("a", algorithm, "0" * 32), Watch())


# Archives


def tar_of(path: Path, *members: tuple[str, bytes | None], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = (tarfile.DIRTYPE, 0) if content is None else (tarfile.REGTYPE, len(content))
            archive.addfile(info, io.BytesIO(content or b""))
    return path


def everything(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_archives_are_unpacked(tmp_path: Path) -> None:
    files = {"a/b/one.txt": b"1", "a/two.txt": b"22", "three": b""}
    rolled = tar_of(tmp_path / "x.tgz", ("a", None), ("./a/b/", None), *files.items())
    plain = tar_of(tmp_path / "x.tar", *files.items(), mode="w")
    others = [tar_of(tmp_path / f"x.{kind}", *files.items(), mode=f"w:{kind}") for kind in ("bz2", "xz")]
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in (("a/", b""), *files.items()):
            packed.writestr(name, content)
    for number, archive in enumerate((rolled, plain, tmp_path / "x.zip", *others)):
        watch = Watch()
        unpack(archive, tmp_path / f"out{number}", watch)
        assert everything(tmp_path / f"out{number}") == files and watch.moved == 3
        assert watch.done == ["unpacking"]


def test_an_archive_that_leaves_its_folder_or_is_cut_is_rejected(tmp_path: Path) -> None:
    evil = tar_of(tmp_path / "evil", ("../escaped", b"x"))
    cut = tmp_path / "cut"
    cut.write_bytes(tar_of(tmp_path / "whole", ("a", os.urandom(100_000))).read_bytes()[:50_000])
    for archive in (evil, cut):
        with pytest.raises(UserError, match=f"unpack .*{archive.name}"):
            unpack(archive, tmp_path / "out", Watch())
    assert not (tmp_path / "escaped").exists()


# From the server to its place


def picture(colour: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(content, "PNG")
    return content.getvalue()


PLACES = ("train/cat", "train/dog", "test/cat", "test/dog")
TREE = [(f"tiny/{place}/a.png", picture(number)) for number, place in enumerate(PLACES)]


def dataset(server: Server, archive: bytes, published: bytes | None = None, lists: bool = False) -> type[Dataset]:
    """A dataset that this server has, and the archive that was published."""
    server.files["/tiny.tgz"] = archive
    digest = hashlib.md5(archive if published is None else published).hexdigest()
    main = Source(f"{server.url}/tiny.tgz", "md5", digest)
    others = []
    for side in ("train", "test") if lists else ():
        content = f"data:\n- x/n0000000{1 + (side == 'test')}/a.png\n".encode()
        server.files[f"/{side}.yaml"] = content
        digest = hashlib.sha256(content).hexdigest()
        others.append(Source(f"{server.url}/{side}.yaml", "sha256", digest, unpack=False))

    class Tiny(Dataset):
        name = "tiny"
        summary = "made up"
        sources = (main, *others)
        folders = ("tiny",)
        layouts = (layouts.LISTED, layouts.tree(layouts.plain_names))
        figures = Figures(2, 2, 2, (1, 1), (1, 1))

    return Tiny


@pytest.fixture
def tree(tmp_path: Path) -> bytes:
    return tar_of(tmp_path / "tree.tgz", *TREE).read_bytes()


def install(kind: type[Dataset], home: Path | None, url: str | None = None, file: Path | None = None) -> list[str]:
    """Returns what lies in the place of all datasets, if it could be installed."""
    found = get(kind, home, url, file, Watch())
    assert found.recognize()
    return sorted(path.name for path in found.place.parent.iterdir())


def test_a_dataset_is_installed_in_the_default_place(
    server: Server, tree: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, place, watch = dataset(server, tree), tmp_path / "home" / "tiny", Watch()
    monkeypatch.setenv("PROBPROMPT_DATA", str(tmp_path / "home"))
    server.cuts = [100]
    place.mkdir(parents=True)
    assert install(kind, None) == ["tiny"], "no archive and no part is left, and an empty folder is no obstacle"
    assert len(kind(place).load(None).train) == 2
    noted = {name: hashlib.new(name, tree).hexdigest() for name in ("md5", "sha256")}
    noted |= {"file": "tiny.tgz", "from": f"{server.url}/tiny.tgz"}
    assert json.loads((place / "source.json").read_text()) == [noted]
    asked = len(server.requests)
    get(kind, tmp_path / "home", None, None, watch)
    assert len(server.requests) == asked and "already" in watch.notes[0]


@pytest.mark.parametrize("reason", ["is not the published tiny.tgz", "unpack", "does not contain tiny"])
def test_a_bad_archive_is_removed_only_if_downloaded(server: Server, tree: bytes, tmp_path: Path, reason: str) -> None:
    others = {"unpack": b"<html>moved</html>", "tiny": tar_of(tmp_path / "x", ("hello.txt", b"x")).read_bytes()}
    bad = others.get(reason.split()[-1], tree)
    kind, home = dataset(server, bad, b"another" if "published" in reason else bad), tmp_path / "home"
    with pytest.raises(UserError, match=rf"{reason}.*\. It was removed. .*--url"):
        install(kind, home)
    assert not list(home.iterdir())
    (home / "tiny.tgz").write_bytes(bad)
    asked = len(server.requests)
    for file, remedy in ((None, "It existed before. Remove it"), (home / "tiny.tgz", "Pass the published tiny.tgz")):
        with pytest.raises(UserError, match=rf"{reason}.*\. {remedy}"):
            install(kind, home, file=file)
    assert len(server.requests) == asked and [path.name for path in home.iterdir()] == ["tiny.tgz"]


def test_mirrors_and_archives_on_disk_are_used(server: Server, tree: bytes, tmp_path: Path) -> None:
    kind, mine = dataset(server, b"gone", tree), tmp_path / "tree.tgz"
    server.files["/mirror.tgz"] = tree
    assert install(kind, tmp_path / "a", f"{server.url}/mirror.tgz") == ["tiny"]
    asked = len(server.requests)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tiny.tgz").write_bytes(tree)
    assert install(kind, tmp_path / "b", f"{server.url}/mirror.tgz") == ["tiny"], "of an interrupted command"
    assert install(kind, tmp_path / "c", file=mine) == ["tiny"]
    assert mine.exists() and len(server.requests) == asked
    with pytest.raises(UserError, match="--url and --file"):
        install(kind, tmp_path / "d", server.url, mine)
    with pytest.raises(UserError, match="nowhere is not a file"):
        install(kind, tmp_path / "d", file=tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"tiny to .*: "):
        install(kind, tmp_path / "file" / "e", file=mine)


def test_an_archive_that_the_disk_cannot_hold_unpacked_is_kept(
    server: Server, tree: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, check = dataset(server, tree), download.check_space

    def full(folder: Path, needed: int, purpose: str) -> None:
        check(folder, 2**80 if purpose.startswith("unpacking") else needed, purpose)

    with monkeypatch.context() as patch:
        patch.setattr(download, "check_space", full)
        with pytest.raises(UserError, match=r"unpacking tiny\.tgz needs .* GB"):
            install(kind, tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["tiny.tgz"]
    asked = len(server.requests)
    assert install(kind, tmp_path / "home") == ["tiny"] and len(server.requests) == asked


def test_other_files_in_the_place_are_never_touched(server: Server, tree: bytes, tmp_path: Path) -> None:
    (tmp_path / "home" / "tiny").mkdir(parents=True)
    (tmp_path / "home" / "tiny" / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match=r"is not tiny.*--dir"):
        install(dataset(server, tree), tmp_path / "home")
    assert (tmp_path / "home" / "tiny" / "mine.txt").exists() and not server.requests


FLAT = [("tiny/n00000001/a.png", picture(1)), ("tiny/n00000002/a.png", picture(2))]


def test_lists_come_with_the_images_and_are_added_to_images_without(server: Server, tmp_path: Path) -> None:
    kind = dataset(server, tar_of(tmp_path / "a.tgz", *FLAT).read_bytes(), lists=True)
    place = get(kind, tmp_path / "home", None, None, Watch()).place
    files = [note["file"] for note in json.loads((place / "source.json").read_text())]
    assert files == ["tiny.tgz", "train.yaml", "test.yaml"]
    for side in ("train", "test"):
        (place / f"{side}.yaml").unlink()
    server.requests.clear()
    data = get(kind, tmp_path / "home", None, None, Watch()).load(None)
    assert (data.train.names, data.test.names) == (("n00000001/a.png",), ("n00000002/a.png",))
    assert [request.path for request in server.requests] == ["/train.yaml", "/test.yaml"]


def test_lists_beside_an_archive_on_disk_need_no_network(server: Server, tmp_path: Path) -> None:
    mine = tar_of(tmp_path / "mine.tgz", *FLAT)
    kind = dataset(server, mine.read_bytes(), lists=True)
    for side in ("train", "test"):
        (tmp_path / f"{side}.yaml").write_bytes(server.files[f"/{side}.yaml"])
    assert install(kind, tmp_path / "home", file=mine) == ["tiny"]
    assert not server.requests
    (tmp_path / "test.yaml").write_text("data:\n- x/n00000001/a.png\n")
    with pytest.raises(UserError, match=r"is not the published test\.yaml"):
        install(kind, tmp_path / "other", file=mine)
    assert not list((tmp_path / "other").iterdir())
