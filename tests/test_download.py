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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from probprompt.data import archives, download, layouts, obtain
from probprompt.data.archives import unpack
from probprompt.data.datasets import Dataset
from probprompt.data.download import verify
from probprompt.data.obtain import get
from probprompt.data.sources import Figures, Source
from probprompt.errors import UserError
from probprompt.progress import ProgressCallback

CONTENT = bytes(range(256)) * 4000


class Watch(ProgressCallback):
    """Remembers what it is told."""

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
    """Serves files, with or without ranges, and cuts connections when told to."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.cuts: list[int] = []
        """After how many bytes the next answers end."""
        self.failures: list[int] = []
        """The codes of the next answers."""
        self.ranges = True
        self.tag: str | None = '"one"'
        self.length = True
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
        if self.redirect:
            to.send_response(302)
            to.send_header("Location", self.redirect)
            to.end_headers()
            return
        start = 0
        if wanted and self.ranges and version in (None, self.tag):
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                to.send_error(416)
                return
        to.send_response(206 if start else 200)
        if start:
            to.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.tag:
            to.send_header("ETag", self.tag)
        if self.length:
            to.send_header("Content-Length", str(len(content) - start))
        to.end_headers()
        end = start + self.cuts.pop(0) if self.cuts else len(content)
        to.wfile.write(content[start:end])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Server()
    made.files["/data.bin"] = CONTENT
    thread = threading.Thread(target=made.web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.web.shutdown()
    thread.join()
    made.web.server_close()


def fetch(server: Server, target: Path, watch: Watch | None = None) -> None:
    download.download(f"{server.url}/data.bin", target, watch or Watch(), pause=0)


# Downloads


@pytest.mark.parametrize("length", [True, False])
def test_a_file_is_fetched_whole(server: Server, tmp_path: Path, length: bool) -> None:
    server.length = length
    watch = Watch()
    fetch(server, tmp_path / "sub" / "data.bin", watch)
    assert (tmp_path / "sub" / "data.bin").read_bytes() == CONTENT
    assert watch.moved == len(CONTENT) and watch.begun == [("data.bin", len(CONTENT) if length else None, 0)]
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["data.bin"], "nothing is left beside it"


def test_a_cut_connection_is_taken_up_where_it_ended(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 200_000]
    watch = Watch()
    fetch(server, tmp_path / "data.bin", watch)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert [request.range for request in server.requests] == [None, "bytes=300000-", "bytes=500000-"]
    assert [request.version for request in server.requests] == [None, '"one"', '"one"']
    assert watch.moved == len(CONTENT), "no byte came twice"
    assert [done for _, _, done in watch.begun] == [0, 300_000, 500_000]
    assert any("0.3 MB" in note for note in watch.notes)
    assert watch.done == ["data.bin"], "what was cut is not done"


def test_what_an_earlier_command_fetched_is_not_fetched_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.cuts = [400_000]
    with pytest.raises(UserError, match=r"0.4 MB are kept, and the same command goes on"):
        fetch(server, tmp_path / "data.bin")
    assert not (tmp_path / "data.bin").exists()
    fetch(server, tmp_path / "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.requests[-1].range == "bytes=400000-"


@pytest.mark.parametrize("tag", ['"one"', None, 'W/"weak"'])
def test_a_server_without_ranges_starts_anew(server: Server, tmp_path: Path, tag: str | None) -> None:
    server.ranges, server.cuts, server.tag = False, [300_000], tag
    fetch(server, tmp_path / "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_ranges_are_used_without_a_version_too(server: Server, tmp_path: Path) -> None:
    server.cuts, server.tag = [300_000], None
    fetch(server, tmp_path / "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.requests[-1] == Request("/data.bin", "bytes=300000-", None)


@pytest.mark.parametrize("tag", ['"two"', None])
def test_parts_of_different_files_are_never_put_together(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str | None
) -> None:
    server.tag = '"one"' if tag else None
    with monkeypatch.context() as patch:
        patch.setattr(download, "ATTEMPTS", 1)
        server.cuts = [400_000]
        with pytest.raises(UserError):
            fetch(server, tmp_path / "data.bin")
    server.tag, server.files["/data.bin"] = tag, CONTENT[::-1] + b"more"
    fetch(server, tmp_path / "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT[::-1] + b"more"


def test_a_file_that_became_shorter_is_fetched_anew(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(download, "ATTEMPTS", 1)
        server.cuts = [400_000]
        with pytest.raises(UserError):
            fetch(server, tmp_path / "data.bin")
    server.files["/data.bin"] = b"short"
    fetch(server, tmp_path / "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == b"short"


def test_a_server_that_is_busy_is_asked_again_and_one_that_has_nothing_is_not(server: Server, tmp_path: Path) -> None:
    server.failures = [503, 500]
    fetch(server, tmp_path / "data.bin")
    assert len(server.requests) == 3
    server.failures = [404]
    with pytest.raises(UserError, match=r"answers 404 Not Found: try a mirror with --url"):
        fetch(server, tmp_path / "other")
    assert len(server.requests) == 4 and not (tmp_path / "other").exists()


UNREACHABLE = [
    urllib.error.URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")),
    urllib.error.URLError(socket.gaierror(socket.EAI_NONAME, "Name or service not known")),
    urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")),
    urllib.error.URLError(OSError(errno.ENETUNREACH, "Network is unreachable")),
    urllib.error.URLError(OSError(errno.EHOSTUNREACH, "No route to host")),
]


def failing(
    monkeypatch: pytest.MonkeyPatch, *problems: urllib.error.URLError | None, slept: list[float] | None = None
) -> list[urllib.error.URLError | None]:
    """Connections fail like this, one after the other, where there is a problem; returns those still to come."""
    opener, left, waited = urllib.request.OpenerDirector.open, list(problems), [] if slept is None else slept

    def connect(self: urllib.request.OpenerDirector, *arguments: Any, **options: Any) -> Any:
        if left and (problem := left.pop(0)):
            raise problem
        return opener(self, *arguments, **options)

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", connect)
    monkeypatch.setattr("time.sleep", waited.append)
    return left


def test_a_server_that_cannot_be_reached_is_told(server: Server, tmp_path: Path) -> None:
    watch = Watch()
    with pytest.raises(UserError, match=r"cannot be reached \(Connection refused\): nothing was fetched.*network"):
        download.download("http://127.0.0.1:9/data.bin", tmp_path / "data.bin", watch)
    assert watch.notes == [], "nothing was cut"


@pytest.mark.parametrize("problem", UNREACHABLE, ids=lambda problem: problem.reason.strerror)
def test_without_a_network_nobody_waits(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: urllib.error.URLError
) -> None:
    slept: list[float] = []
    left = failing(monkeypatch, problem, None, slept=slept)
    watch = Watch()
    with pytest.raises(UserError, match=r"cannot be reached") as told:
        fetch(server, tmp_path / "data.bin", watch)
    assert f"({problem.reason.strerror})" in str(told.value) and "urlopen" not in str(told.value)  # type: ignore[union-attr]
    assert left == [None] and slept == [] and watch.notes == [], "asked once"


@pytest.mark.parametrize("problem", UNREACHABLE, ids=lambda problem: problem.reason.strerror)
def test_a_network_that_is_lost_on_the_way_is_waited_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: urllib.error.URLError
) -> None:
    server.cuts = [300_000]
    failing(monkeypatch, None, problem, problem, None)
    watch = Watch()
    fetch(server, tmp_path / "data.bin", watch)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT and len(watch.notes) == 3
    assert [request.range for request in server.requests] == [None, "bytes=300000-"]


def test_a_connection_that_takes_too_long_is_tried_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, urllib.error.URLError(TimeoutError("timed out")), None)
    watch = Watch()
    fetch(server, tmp_path / "data.bin", watch)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert watch.notes == ["cut after 0.0 MB (timed out): going on"]


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "cifar100", ""])
def test_only_web_addresses_are_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="is no web address"):
        download.download(url, tmp_path / "x", Watch())


def test_redirects_are_followed_to_the_web_alone(server: Server, tmp_path: Path) -> None:
    server.redirect = "ftp://127.0.0.1/data.bin"
    with pytest.raises(UserError, match=r"leads to ftp://127.0.0.1/data.bin, which is not followed"):
        fetch(server, tmp_path / "data.bin")
    safe, request = download._SafeRedirects(), urllib.request.Request("https://example.org/a")
    with pytest.raises(UserError, match="is not followed"):
        safe.redirect_request(request, io.BytesIO(), 302, "", Message(), "http://example.org/a")
    assert safe.redirect_request(request, io.BytesIO(), 302, "", Message(), "https://example.org/b") is not None


def test_a_disk_without_room_is_told_before_anything_is_moved(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    watch = Watch()
    with pytest.raises(UserError, match=r"needs 0.07 GB in .* where 0.00 GB are free"):
        fetch(server, tmp_path / "data.bin", watch)
    assert watch.moved == 0


def test_hashes_decide(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(CONTENT)
    md5, sha256 = hashlib.md5(CONTENT).hexdigest(), hashlib.sha256(CONTENT).hexdigest()
    assert verify(path, Source("", "a", md5=md5, sha256=sha256), Watch()) == {"md5": md5, "sha256": sha256}
    for wrong in ((None, "0" * 64), ("0" * 32, None), (md5, "0" * 64)):
        with pytest.raises(UserError, match=r"is not the published a: its (md5|sha256) is .*, published is 0000"):
            verify(path, Source("", "a", *wrong), Watch())


# Archives


def tar_of(path: Path, *members: tuple[str, bytes | None] | tarfile.TarInfo, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            if member[1] is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return path


def zip_of(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def zip_link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


def everything(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_archives_are_unpacked(tmp_path: Path) -> None:
    files = {"a/b/one.txt": b"1", "a/two.txt": b"22", "three": b""}
    rolled = tar_of(tmp_path / "x.tgz", ("a", None), ("./a/b/", None), *files.items())
    plain = tar_of(tmp_path / "x.tar", *files.items(), mode="w")
    packed = zip_of(tmp_path / "x.zip", ("a/", b""), *files.items())
    others = [tar_of(tmp_path / f"x.{kind}", *files.items(), mode=f"w:{kind}") for kind in ("bz2", "xz")]
    for number, archive in enumerate((rolled, plain, packed, *others)):
        moved: list[int] = []
        unpack(archive, tmp_path / f"out{number}", moved.append)
        assert everything(tmp_path / f"out{number}") == files and sum(moved) == 3


EVIL: dict[str, Callable[[Path], Path]] = {
    "absolute": lambda path: tar_of(path, ("/tmp/probprompt-escaped", b"x")),
    "above": lambda path: tar_of(path, ("a/../../escaped", b"x")),
    "backslash": lambda path: tar_of(path, ("a\\..\\..\\escaped", b"x")),
    "drive": lambda path: tar_of(path, ("C:escaped", b"x")),
    "symlink": lambda path: tar_of(path, special("a", tarfile.SYMTYPE, "/etc"), ("a/passwd", b"x")),
    "inner symlink": lambda path: tar_of(path, ("b", b"1"), special("a", tarfile.SYMTYPE, "b")),
    "hard link": lambda path: tar_of(path, special("a", tarfile.LNKTYPE, "/etc/passwd")),
    "device": lambda path: tar_of(path, special("a", tarfile.CHRTYPE)),
    "pipe": lambda path: tar_of(path, special("a", tarfile.FIFOTYPE)),
    "twice": lambda path: tar_of(path, ("a", b"1"), ("a", b"2")),
    "file as folder": lambda path: tar_of(path, ("a", b"1"), ("a/b", b"2")),
    "folder as file": lambda path: tar_of(path, ("a/b", b"1"), ("a", b"2")),
    "zip above": lambda path: zip_of(path, ("../escaped", b"x")),
    "zip absolute": lambda path: zip_of(path, ("/escaped", b"x")),
    "zip symlink": lambda path: zip_of(path, (zip_link("a"), b"/etc")),
    "zip bomb": lambda path: zip_of(path, ("a", bytes(70 * 2**20))),
    "tar bomb": lambda path: tar_of(path, ("a", bytes(70 * 2**20))),
}


@pytest.mark.parametrize("kind", EVIL)
def test_evil_archives_are_refused(tmp_path: Path, kind: str) -> None:
    archive = EVIL[kind](tmp_path / "evil")
    with pytest.raises(UserError, match="refused"):
        unpack(archive, tmp_path / "in" / "out")
    outside = {path.name for path in tmp_path.rglob("*")} - {"evil", "in", "out", "a", "b"}
    assert not outside and not Path("/tmp/probprompt-escaped").exists()
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MEMBERS", 2)
    with pytest.raises(UserError, match="or 2 files: it is refused"):
        unpack(tar_of(tmp_path / "x", *((str(index), b"") for index in range(3))), tmp_path / "out")


def test_damaged_archives_are_told(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "x.tgz", ("a", os.urandom(100_000))).read_bytes()
    (tmp_path / "cut.tgz").write_bytes(whole[:50_000])
    with pytest.raises(UserError, match="is damaged"):
        unpack(tmp_path / "cut.tgz", tmp_path / "out")
    packed = bytearray(zip_of(tmp_path / "x.zip", ("a", b"content" * 99)).read_bytes())
    packed[40] ^= 255
    (tmp_path / "bad.zip").write_bytes(packed)
    with pytest.raises(UserError, match="is damaged"):
        unpack(tmp_path / "bad.zip", tmp_path / "out2")
    (tmp_path / "no").write_bytes(b"hello")
    with pytest.raises(UserError, match="neither a tar nor a zip"):
        unpack(tmp_path / "no", tmp_path / "out3")
    (tmp_path / "cut.zip").write_bytes(packed[:60])
    with pytest.raises(UserError, match="is damaged: it begins like an archive"):
        unpack(tmp_path / "cut.zip", tmp_path / "out4")


MANY = [(f"files/{index}", os.urandom(20_000)) for index in range(20)]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("place", [0.3, 0.5, 0.8])
def test_damage_in_the_middle_of_an_archive_is_told(tmp_path: Path, mode: str, place: float) -> None:
    content = bytearray(tar_of(tmp_path / "x", *MANY, mode=mode).read_bytes())
    start = round(place * len(content))
    if mode == "w":
        start = content.index(b"files/", start)  # a tar knows whether its headers are whole
    content[start : start + 600] = bytes(byte ^ 85 for byte in content[start : start + 600])
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        unpack(tmp_path / "x", tmp_path / "out")


@pytest.mark.parametrize("place", [-8, -5, -4, -1])
def test_the_checksums_behind_the_end_are_read(tmp_path: Path, place: int) -> None:
    content = bytearray(tar_of(tmp_path / "x", *MANY).read_bytes())
    content[place] ^= 1
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        unpack(tmp_path / "x", tmp_path / "out")


def holed(content: bytes) -> bytes:
    """A hole of empty blocks where a header and more was."""
    start = content.index(b"files/9")
    return content[:start] + bytes(2048) + content[start + 2048 :]


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda content: content[: content.index(b"files/9")], "its end is missing"),
        (lambda content: content[: content.index(b"files/9") + 100], "its end is missing"),
        (holed, "what follows byte .* cannot be read"),
        (lambda content: content + bytes(2**27), "what follows byte .* cannot be read"),
    ],
)
def test_a_tar_that_does_not_end_as_it_should_is_damaged(
    tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    (tmp_path / "x").write_bytes(damage(tar_of(tmp_path / "x", *MANY, mode="w").read_bytes()))
    with pytest.raises(UserError, match=f"is damaged: {reason}"):
        unpack(tmp_path / "x", tmp_path / "out")


# From the server to its place


def picture(colour: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(content, "PNG")
    return content.getvalue()


PLACES = ("train/cat", "train/dog", "test/cat", "test/dog")
TREE = [(f"tiny/{place}/a.png", picture(number)) for number, place in enumerate(PLACES)]


def dataset(server: Server, archive: bytes, md5: str | None = None, lists: bool = False) -> type[Dataset]:
    """A dataset that this server publishes."""
    server.files["/tiny.tgz"] = archive
    main = Source(f"{server.url}/tiny.tgz", "tiny.tgz", md5=md5)
    others = []
    for side in ("train", "test") if lists else ():
        content = f"data:\n- x/n0000000{1 + (side == 'test')}/a.png\n".encode()
        server.files[f"/{side}.yaml"] = content
        digest = hashlib.sha256(content).hexdigest()
        others.append(Source(f"{server.url}/{side}.yaml", f"{side}.yaml", sha256=digest, unpack=False))

    class Tiny(Dataset):
        name = "tiny"
        summary = "made up"
        sources = (main, *others)
        folders = ("tiny",)
        layouts = (layouts.LISTED, layouts.tree(layouts.plain_names))
        figures = Figures(2, 2, 2, (1, 1), (1, 1))

    return Tiny


def test_a_dataset_is_fetched_verified_unpacked_and_put_in_its_place(server: Server, tmp_path: Path) -> None:
    archive = tar_of(tmp_path / "a.tgz", *TREE).read_bytes()
    kind = dataset(server, archive, hashlib.md5(archive).hexdigest())
    server.cuts = [100]
    found = get(kind, tmp_path / "home", None, None, Watch(), pause=0)
    assert found.place == tmp_path / "home" / "tiny" and len(found.load(None).train) == 2
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["tiny"], "no archive and no part is left"
    (note,) = json.loads((found.place / "source.json").read_text())
    assert note == {
        "file": "tiny.tgz",
        "from": f"{server.url}/tiny.tgz",
        "md5": hashlib.md5(archive).hexdigest(),
        "sha256": hashlib.sha256(archive).hexdigest(),
    }
    asked, watch = len(server.requests), Watch()
    get(kind, tmp_path / "home", None, None, watch, pause=0)
    assert len(server.requests) == asked and "already" in watch.notes[0]


def test_the_usual_place_is_used_by_default(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBPROMPT_DATA", str(tmp_path / "home"))
    kind = dataset(server, tar_of(tmp_path / "a.tgz", *TREE).read_bytes())
    watch = Watch()
    assert get(kind, None, None, None, watch).place == tmp_path / "home" / "tiny"
    digest = hashlib.sha256(server.files["/tiny.tgz"]).hexdigest()
    assert f"no hash of tiny.tgz was published; this one has sha256 {digest}" in watch.notes


def test_a_wrong_hash_puts_nothing_in_place(server: Server, tmp_path: Path) -> None:
    kind = dataset(server, tar_of(tmp_path / "a.tgz", *TREE).read_bytes(), "0" * 32)
    with pytest.raises(UserError, match=r"is not the published tiny.tgz.*It was removed: try again"):
        get(kind, tmp_path / "home", None, None, Watch(), pause=0)
    assert not list((tmp_path / "home").iterdir())


def test_an_evil_archive_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    kind = dataset(server, tar_of(tmp_path / "a.tgz", *TREE, ("../../escaped", b"x")).read_bytes())
    with pytest.raises(UserError, match="outside of its folder"):
        get(kind, tmp_path / "home", None, None, Watch(), pause=0)
    assert not list((tmp_path / "home").iterdir())
    assert not list(tmp_path.rglob("escaped"))


BAD: dict[str, Callable[[Path], bytes]] = {
    "is neither a tar nor a zip archive": lambda path: b"<html>moved</html>",
    "is damaged": lambda path: tar_of(path, *MANY).read_bytes()[:200_000],
    "holds nothing that looks like tiny": lambda path: tar_of(path, ("hello.txt", b"x")).read_bytes(),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_archive_that_was_fetched_is_removed(server: Server, tmp_path: Path, reason: str) -> None:
    kind = dataset(server, BAD[reason](tmp_path / "a.tgz"))
    server.files["/mirror.tgz"] = tar_of(tmp_path / "b.tgz", *TREE).read_bytes()
    for url in (None, f"{server.url}/tiny.tgz"):
        watch = Watch()
        with pytest.raises(UserError, match=rf"{reason}.*\. It was removed: try again, or name a mirror with --url"):
            get(kind, tmp_path / "home", url, None, watch, pause=0)
        assert not list((tmp_path / "home").iterdir())
        assert "unpacking" not in watch.done or "nothing" in reason
    found = get(kind, tmp_path / "home", f"{server.url}/mirror.tgz", None, Watch(), pause=0)
    assert len(found.load(None).train) == 2
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["tiny"]


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_archive_that_the_user_has_put_there_stays(server: Server, tmp_path: Path, reason: str) -> None:
    kind = dataset(server, tar_of(tmp_path / "a.tgz", *TREE).read_bytes())
    mine = tmp_path / "home" / "tiny.tgz"
    mine.parent.mkdir()
    mine.write_bytes(BAD[reason](tmp_path / "b.tgz"))
    with pytest.raises(UserError, match=rf"{reason}.*\. It was there already: remove it, and the same command fetches"):
        get(kind, tmp_path / "home", None, None, Watch(), pause=0)
    with pytest.raises(UserError, match=rf"{reason}.*\. Name the right archive"):
        get(kind, tmp_path / "home", None, mine, Watch(), pause=0)
    assert mine.exists() and not server.requests
    found = get(kind, tmp_path / "home", f"{server.url}/tiny.tgz", None, Watch(), pause=0)
    (note,) = json.loads((found.place / "source.json").read_text())
    assert note["from"] == f"{server.url}/tiny.tgz", "the address that was named is taken, not what lies there"
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["tiny", "tiny.tgz"]


def test_an_archive_with_the_published_hash_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    archive = tar_of(tmp_path / "a.tgz", *TREE).read_bytes()
    kind = dataset(server, b"", hashlib.md5(archive).hexdigest())
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "tiny.tgz").write_bytes(archive + b"?")
    with pytest.raises(UserError, match=r"is not the published tiny\.tgz.*It was there already: remove it"):
        get(kind, tmp_path / "home", f"{server.url}/tiny.tgz", None, Watch(), pause=0)
    (tmp_path / "home" / "tiny.tgz").write_bytes(archive)
    assert get(kind, tmp_path / "home", f"{server.url}/tiny.tgz", None, Watch(), pause=0).recognise()
    assert not server.requests


def test_a_good_archive_is_kept_where_the_disk_is_full(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, needed: int, purpose: str) -> None:
        raise UserError(f"{purpose}: make room")

    kind = dataset(server, tar_of(tmp_path / "a.tgz", *TREE).read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(obtain, "make_room", full)
        with pytest.raises(UserError, match=r"unpacking tiny\.tgz: make room"):
            get(kind, tmp_path / "home", None, None, Watch(), pause=0)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["tiny.tgz"]
    asked = len(server.requests)
    assert get(kind, tmp_path / "home", None, None, Watch(), pause=0).recognise()
    assert len(server.requests) == asked


def test_a_mirror_and_an_archive_at_hand_are_used(server: Server, tmp_path: Path) -> None:
    mine = tar_of(tmp_path / "mine.tgz", *TREE)
    kind = dataset(server, b"gone", hashlib.md5(mine.read_bytes()).hexdigest())
    server.files["/mirror/tiny.tgz"] = mine.read_bytes()
    assert get(kind, tmp_path / "a", f"{server.url}/mirror/tiny.tgz", None, Watch()).recognise()
    asked = len(server.requests)
    assert get(kind, tmp_path / "b", None, mine, Watch()).recognise()
    assert mine.exists() and len(server.requests) == asked
    with pytest.raises(UserError, match="exclude each other"):
        get(kind, tmp_path / "c", server.url, mine, Watch())
    with pytest.raises(UserError, match="is no file"):
        get(kind, tmp_path / "c", None, tmp_path / "nowhere", Watch())
    other = tar_of(tmp_path / "other.tgz", ("a", b""))
    with pytest.raises(UserError, match="is not the published"):
        get(kind, tmp_path / "c", None, other, Watch())
    assert other.exists() and not list((tmp_path / "c").iterdir())


def test_what_lies_in_the_place_is_never_touched(server: Server, tmp_path: Path) -> None:
    (tmp_path / "home" / "tiny").mkdir(parents=True)
    kind = dataset(server, tar_of(tmp_path / "a.tgz", *TREE).read_bytes())
    (tmp_path / "home" / "tiny" / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="exists and does not look like tiny"):
        get(kind, tmp_path / "home", None, None, Watch())
    (tmp_path / "home" / "tiny" / "mine.txt").unlink()
    assert get(kind, tmp_path / "home", None, None, Watch()).recognise(), "an empty folder is no obstacle"


FLAT = [("tiny/n00000001/a.png", picture(1)), ("tiny/n00000002/a.png", picture(2))]


def test_lists_come_with_the_images(server: Server, tmp_path: Path) -> None:
    kind = dataset(server, tar_of(tmp_path / "a.tgz", *FLAT).read_bytes(), lists=True)
    found = get(kind, tmp_path / "home", None, None, Watch())
    assert found.load(None).test.names == ("n00000002/a.png",)
    assert [note["file"] for note in json.loads((found.place / "source.json").read_text())] == [
        "tiny.tgz",
        "train.yaml",
        "test.yaml",
    ]


def test_lists_alone_are_fetched_where_the_images_are(server: Server, tmp_path: Path) -> None:
    kind = dataset(server, b"", lists=True)
    unpack(tar_of(tmp_path / "a.tgz", *FLAT), tmp_path / "home" / "tiny")
    found = get(kind, tmp_path / "home", None, None, Watch())
    assert found.load(None).train.names == ("n00000001/a.png",)
    assert [request.path for request in server.requests] == ["/train.yaml", "/test.yaml"]


def test_lists_beside_an_archive_at_hand_need_no_network(server: Server, tmp_path: Path) -> None:
    mine = tar_of(tmp_path / "mine.tgz", *FLAT)
    kind = dataset(server, b"", lists=True)
    for side in ("train", "test"):
        (tmp_path / f"{side}.yaml").write_bytes(server.files[f"/{side}.yaml"])
    assert len(get(kind, tmp_path / "home", None, mine, Watch()).load(None).train) == 1
    assert not server.requests
    (tmp_path / "test.yaml").write_text("data:\n- x/n00000001/a.png\n")
    with pytest.raises(UserError, match=r"is not the published test\.yaml"):
        get(kind, tmp_path / "other", None, mine, Watch())
    assert not list((tmp_path / "other").iterdir())
