"""A stand-in for the hub's API: models pushed and pulled, and datasets, over real HTTP on this machine only."""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

YAML: Any = import_module("yaml")  # comes with the hub's client; without types

DATASETS = "datasets/"  # prefix of the names of datasets
TOKEN = "hf_of_the_tests"  # may write to the repositories of ``me``


class RefusalError(Exception):
    """An error of the API: status, message and code."""

    def __init__(self, status: int, message: str, code: str = "", **more: str) -> None:
        super().__init__(status, {"error": message, **more}, {"X-Error-Code": code} if code else {})


@dataclass
class Repository:
    """Files by commit, the newest commit last."""

    private: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # commits by branch or tag, without ``main``

    def commit(self, files: dict[str, bytes]) -> str:
        digest = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits.append((digest, files))
        return digest

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][1]

    def at(self, revision: str, error: str = "RevisionNotFound") -> tuple[str, dict[str, bytes]]:
        if revision == "main":
            return self.commits[-1]
        for one in self.commits:
            if one[0] == self.names.get(revision, revision):
                return one
        raise RefusalError(404, "Invalid rev id", error)


class Hub:
    """The server, and what it holds."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}  # datasets with their prefix
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.moved: dict[str, str] = {}  # repositories by their former name
        self.cuts: dict[str, list[int]] = {}  # by file: after how many bytes the next answers end
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 (the names that the server calls)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.web.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.web.server_address[1]}"
        threading.Thread(target=self.web.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.web.shutdown()
        self.web.server_close()

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        path = urlsplit(to.path).path
        self.requests.append(f"{to.command} {unquote(path)}")
        body = to.rfile.read(int(to.headers.get("Content-Length") or 0))
        try:
            self.route(to, path, body)
        except RefusalError as refusal:
            say(to, *refusal.args)

    def route(self, to: BaseHTTPRequestHandler, path: str, body: bytes) -> None:
        for pattern, act in ROUTES.items():
            if found := re.fullmatch(pattern, path):
                given = {name: unquote(value) for name, value in found.groupdict("").items()}
                repo = given.get("repo", "")
                if repo in self.moved:
                    say(to, 307, {}, {"Location": to.path.replace(repo, self.moved[repo])})
                else:
                    act(self, to, body, **given)
                return
        raise RefusalError(404, f"no such page: {path}")

    def check_token(self, to: BaseHTTPRequestHandler, owner: str) -> None:
        if to.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusalError(401, "Invalid username or password.")
        if owner != "me":
            raise RefusalError(403, f"You don't have the rights to create a model under the namespace {owner!r}")

    def visible(self, to: BaseHTTPRequestHandler, repo: str) -> Repository:
        found = self.repositories.get(repo)
        if found is None or (found.private and to.headers.get("Authorization") != f"Bearer {TOKEN}"):
            raise RefusalError(404, "Repository not found", "RepoNotFound")
        return found

    def create(self, to: BaseHTTPRequestHandler, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        self.check_token(to, asked["organization"])
        if repo in self.repositories:
            raise RefusalError(409, "You already created this model repo", url=f"{self.url}/{repo}")
        self.repositories[repo] = Repository(asked.get("visibility") == "private" or asked.get("private") is True)
        self.repositories[repo].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        say(to, 200, {"url": f"{self.url}/{repo}"})

    def info(self, to: BaseHTTPRequestHandler, body: bytes, repo: str, revision: str) -> None:
        found = self.visible(to, repo)
        digest, files = found.at(revision or "main")
        about = {"id": repo.removeprefix(DATASETS), "sha": digest, "private": found.private}
        say(to, 200, {**about, "siblings": [{"rfilename": path} for path in files]})

    def tree(self, to: BaseHTTPRequestHandler, body: bytes, repo: str, revision: str, path: str) -> None:
        """List the content of a folder, recursively on request."""
        files = self.visible(to, repo).at(revision)[1]
        within = [one for one in map(PurePosixPath, files) if PurePosixPath(path) in one.parents]
        if not within:
            raise RefusalError(404, "Entry not found", "EntryNotFound")
        folders = {above for one in within for above in one.parents if PurePosixPath(path) in above.parents}
        deep = parse_qs(urlsplit(to.path).query)["recursive"] == ["true"]
        shown = [one for one in sorted({*within, *folders}) if deep or one.parent == PurePosixPath(path)]
        say(to, 200, [entry(str(one), files.get(str(one))) for one in shown])

    def validate(self, to: BaseHTTPRequestHandler, body: bytes) -> None:
        """Refuse a card whose front matter cannot be read."""
        content = json.loads(body)["content"]
        try:
            problems = [] if isinstance(YAML.safe_load(content.split("---\n")[1]), dict) else ["no mapping"]
        except (YAML.YAMLError, IndexError) as problem:
            problems = [str(problem)]
        say(to, 400 if problems else 200, {"errors": [{"message": one} for one in problems], "warnings": []})

    def preupload(self, to: BaseHTTPRequestHandler, body: bytes, repo: str) -> None:
        self.check_token(to, repo.partition("/")[0])
        paths = [file["path"] for file in json.loads(body)["files"]]
        files = zip(paths, ["lfs" if path.endswith(".safetensors") else "regular" for path in paths], strict=True)
        say(to, 200, {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in files]})

    def batch(self, to: BaseHTTPRequestHandler, body: bytes, repo: str) -> None:
        objects: list[dict[str, Any]] = []
        for one in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}
            objects.append({**one, **({} if one["oid"] in self.large else {"actions": upload})})
        say(to, 200, {"transfer": "basic", "objects": objects})

    def upload(self, to: BaseHTTPRequestHandler, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise RefusalError(400, "other bytes than announced")
        self.large[oid] = body
        say(to, 200, {})

    def commit(self, to: BaseHTTPRequestHandler, body: bytes, repo: str) -> None:
        self.check_token(to, repo.partition("/")[0])
        found, lines = self.repositories[repo], [json.loads(line) for line in body.splitlines()]
        if lines[0]["value"].get("parentCommit") not in (None, found.commits[-1][0]):
            raise RefusalError(412, "A commit has happened since.")
        files = dict(found.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            else:
                del files[value["path"]]
        digest = found.commit(files)
        say(to, 200, {"commitUrl": f"{self.url}/{repo}/commit/{digest}", "commitOid": digest, "success": True})

    def resolve(self, to: BaseHTTPRequestHandler, body: bytes, repo: str, revision: str, path: str) -> None:
        digest, files = self.visible(to, repo).at(revision, "EntryNotFound")
        if path not in files:
            raise RefusalError(404, "Entry not found", "EntryNotFound")
        content = files[path]
        wanted = re.fullmatch(r"bytes=(\d+)-", to.headers.get("Range") or "")
        start = int(wanted[1]) if wanted else 0
        to.send_response(206 if start else 200)
        if start:
            to.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        to.send_header("Content-Length", str(len(content) - start))
        # On the hub, the hash of the contents of large files; here of the commit, so that other bytes are not noticed.
        to.send_header("ETag", f'"{hashlib.sha256(f"{repo} {digest} {path}".encode()).hexdigest()}"')
        to.send_header("X-Repo-Commit", digest)
        cuts = self.cuts.get(path) if to.command == "GET" else None
        if cuts:
            to.send_header("Connection", "close")
            to.close_connection = True
        to.end_headers()
        if to.command == "GET":
            to.wfile.write(content[start : start + cuts.pop(0)] if cuts else content[start:])


def entry(path: str, content: bytes | None) -> dict[str, Any]:
    kind = "directory" if content is None else "file"
    return {"type": kind, "path": path, "size": len(content or b""), "oid": hashlib.sha1(content or b"").hexdigest()}


def say(to: BaseHTTPRequestHandler, code: int, value: Any, headers: dict[str, str] | None = None) -> None:
    data = json.dumps(value).encode()
    to.send_response(code)
    for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
        to.send_header(name, text)
    if "error" in value:
        to.send_header("X-Error-Message", value["error"])
    to.end_headers()
    if to.command != "HEAD":
        to.wfile.write(data)


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_DATASET = rf"(?P<repo>{DATASETS}(?:[^/]+/)?[^/]+)"
ROUTES: dict[str, Any] = {
    r"/api/repos/create": Hub.create,
    r"/api/validate-yaml": Hub.validate,
    rf"/api/models/{_REPO}(?:/revision/(?P<revision>[^/]+))?": Hub.info,
    rf"/api/models/{_REPO}/preupload/main": Hub.preupload,
    rf"/api/models/{_REPO}/commit/main": Hub.commit,
    rf"/{_REPO}\.git/info/lfs/objects/batch": Hub.batch,
    r"/lfs/(?P<oid>[0-9a-f]{64})": Hub.upload,
    rf"/api/{_DATASET}(?:/revision/(?P<revision>[^/]+))?": Hub.info,
    rf"/api/{_DATASET}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?": Hub.tree,
    rf"/{_DATASET}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": Hub.resolve,
    rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": Hub.resolve,
}


@contextmanager
def alone(patch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """Let the hub's client reach only a stand-in, with its cache in a folder."""
    hub, find = Hub(), socket.getaddrinfo

    def only_here(host: Any, *more: Any, **named: Any) -> Any:
        if host != "127.0.0.1":
            raise OSError(f"a test must not reach {host}")
        return find(host, *more, **named)

    patch.setattr(socket, "getaddrinfo", only_here)
    patch.setenv("HF_ENDPOINT", hub.url)
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    for name in ("HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH", "AGENT_HARNESSES_PATH"):
        patch.setattr(constants, name, str(folder / "none"), raising=False)
    try:
        yield hub
    finally:
        hub.close()
