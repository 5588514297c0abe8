"""A small Hub on this computer: it speaks the calls by which `huggingface_hub` uploads and downloads a model.

    with HubStandIn() as hub:
        subprocess.run(..., env=os.environ | hub.environment(tmp_path))
    hub.repos["me/model"].files()  # what is in the main branch

Everything is in memory. As on the Hub, large files go up first and by themselves, and count only when a commit names
them; a commit is whole or nothing. `faults` makes calls fail.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


TOKEN = "hf_standin"
USER = "me"
LARGE_SUFFIXES = (".safetensors", ".png")
VANISH = 0  # a fault: the connection breaks, and nobody listens from then on


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Commit:
    number: int
    files: dict[str, bytes]
    message: str = "initial commit"

    @property
    def oid(self) -> str:
        return hashlib.sha1(f"{self.number} {self.message}".encode()).hexdigest()


@dataclass
class Repo:
    name: str
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit(0, {})]})

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.branches[branch][-1].files

    def find(self, revision: str) -> Commit:
        """The newest commit of a branch, or the one with this id; KeyError if there is none."""
        if revision in self.branches:
            return self.branches[revision][-1]
        return {commit.oid: commit for commits in self.branches.values() for commit in commits}[revision]


class HubStandIn:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.faults: dict[str, int] = {}  # a pattern of "METHOD /path" -> the status to answer, or VANISH
        self.requests: list[str] = []
        self.lock = threading.Lock()

    def __enter__(self) -> "HubStandIn":
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        # Another name, as the Hub's large files are on another host: the client would follow a redirect within one.
        self.files_url = f"http://localhost:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables by which a new process finds this Hub and nothing that it had cached before."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_HUB_DISABLE_XET": "1",  # a protocol of its own, which this server does not speak
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": TOKEN,
        }


class Refusal(Exception):
    """An error that the client gets as the Hub would give it."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, "X-Error-Code": code} | headers


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStandIn

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        path, self.query, body = unquote(url.path), parse_qs(url.query), self.read_body()
        call = f"{self.command} {path}"
        self.hub.requests.append(call)
        fault = next((status for pattern, status in self.hub.faults.items() if re.search(pattern, call)), None)
        if fault == VANISH:
            self.vanish()
            return
        try:
            if fault is not None:
                raise Refusal(fault, "a fault of the stand-in")
            for pattern, method in ROUTES:
                match = re.fullmatch(pattern, call)
                if match:
                    with self.hub.lock:
                        method(self, body, **match.groupdict())
                    return
            raise Refusal(404, f"the stand-in does not know {call}")
        except Refusal as refusal:
            self.reply({"error": str(refusal)}, refusal.status, refusal.headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def vanish(self) -> None:
        self.hub.server.shutdown()
        self.hub.server.server_close()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reply(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass

    # ---- Who asks, and for what

    def require_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, "Invalid username or password.")

    def repo(self, name: str) -> Repo:
        found = self.hub.repos.get(name)
        if found is None or (found.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            raise Refusal(404, "Repository not found", "RepoNotFound")  # private ones are not to be told apart
        return found

    def commit_of(self, repo: Repo, revision: str) -> Commit:
        try:
            return repo.find(revision)
        except KeyError:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None

    # ---- Upload

    def create_repo(self, body: bytes) -> None:
        self.require_token()
        asked = json.loads(body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repos:
            self.reply({"error": "You already created this model repo"} | url, 409)
            return
        private = asked.get("visibility") == "private" or bool(asked.get("private"))  # releases differ
        self.hub.repos[name] = Repo(name, private)
        self.reply(url)

    def create_branch(self, body: bytes, name: str, branch: str) -> None:
        self.require_token()
        repo = self.repo(name)
        if branch in repo.branches:
            raise Refusal(409, f"Reference already exists: {branch}")
        repo.branches[branch] = list(repo.branches["main"])
        self.reply({})

    def validate_yaml(self, body: bytes) -> None:
        start = json.loads(body)["content"].startswith("---\n")
        self.reply({"errors": [] if start else [{"message": "no metadata"}], "warnings": []}, 200 if start else 400)

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        self.require_token()
        present = self.commit_of(self.repo(name), revision).files
        answers = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith(LARGE_SUFFIXES) or file["size"] > 10_000_000
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if file["path"] in present:
                data = present[file["path"]]
                answer["oid"] = hashlib.sha256(data).hexdigest() if large else git_hash(data)
            answers.append(answer)
        self.reply({"files": answers})

    def lfs_batch(self, body: bytes, name: str) -> None:
        self.require_token()
        self.repo(name)
        objects = json.loads(body)["objects"]
        for file in objects:
            if file["oid"] not in self.hub.large:
                upload, verify = (f"{self.hub.url}/{kind}/{file['oid']}" for kind in ("large", "verify"))
                file["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
        self.reply({"transfer": "basic", "objects": objects})

    def put_large(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "the content is not what was announced")
        self.hub.large[oid] = body
        self.reply(b"")

    def verify_large(self, body: bytes, oid: str) -> None:
        self.require_token()
        if len(self.hub.large.get(oid, b"")) != json.loads(body)["size"]:
            raise Refusal(404, "this content did not arrive")
        self.reply({})

    def make_commit(self, body: bytes, name: str, revision: str) -> None:
        self.require_token()
        repo = self.repo(name)
        files, message = dict(self.commit_of(repo, revision).files), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile" and value["oid"] in self.hub.large:
                files[value["path"]] = self.hub.large[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refusal(400, f"cannot commit {item['key']} {value.get('path')}")
        commit = Commit(len(repo.branches[revision]), files, message)
        repo.branches[revision].append(commit)
        self.reply({"commitUrl": f"{self.hub.url}/{name}/commit/{commit.oid}", "commitOid": commit.oid})

    # ---- Download

    def repo_info(self, body: bytes, name: str, revision: str = "main") -> None:
        repo = self.repo(name)
        commit = self.commit_of(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        self.reply({"id": name, "sha": commit.oid, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, body: bytes, name: str, revision: str, folder: str | None = None) -> None:
        commit = self.commit_of(self.repo(name), revision)
        prefix = f"{folder}/" if folder else ""
        inside = {path: data for path, data in commit.files.items() if path.startswith(prefix)}
        if folder and not inside:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        entries, folders = [], set()
        for path, data in sorted(inside.items()):
            folders |= {prefix + path[len(prefix) :].split("/")[0]} if "/" in path[len(prefix) :] else set()
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_hash(data)}
            if path.endswith(LARGE_SUFFIXES):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        if self.query.get("recursive", ["false"])[0].lower() not in ("true", "1"):
            entries = [entry for entry in entries if "/" not in entry["path"][len(prefix) :]]
        self.reply([{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in folders] + entries)

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        commit = self.commit_of(self.repo(name), revision)
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            raise Refusal(404, f"{path} does not exist", "EntryNotFound", **headers)
        data = commit.files[path]
        if not path.endswith(LARGE_SUFFIXES):
            self.reply(data, headers=headers | {"ETag": f'"{git_hash(data)}"'})
            return
        oid = hashlib.sha256(data).hexdigest()
        headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data))}
        headers["Location"] = f"{self.hub.files_url}/large/{oid}"
        self.reply(b"", 302, headers)

    def get_large(self, body: bytes, oid: str) -> None:
        if oid not in self.hub.large:
            raise Refusal(404, "there is no such content")
        self.reply(self.hub.large[oid], headers={"ETag": f'"{oid}"'})

    def whoami(self, body: bytes) -> None:
        self.require_token()
        self.reply({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})


NAME = "(?P<name>[^/]+/[^/]+)"
ROUTES = [
    ("POST /api/repos/create", Handler.create_repo),
    ("POST /api/validate-yaml", Handler.validate_yaml),
    ("GET /api/whoami-v2", Handler.whoami),
    (f"POST /api/models/{NAME}/branch/(?P<branch>.+)", Handler.create_branch),
    (f"POST /api/models/{NAME}/preupload/(?P<revision>.+)", Handler.preupload),
    (f"POST /api/models/{NAME}/commit/(?P<revision>.+)", Handler.make_commit),
    (f"POST /{NAME}[.]git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT /large/(?P<oid>[0-9a-f]+)", Handler.put_large),
    ("POST /verify/(?P<oid>[0-9a-f]+)", Handler.verify_large),
    (f"GET /api/models/{NAME}", Handler.repo_info),
    (f"GET /api/models/{NAME}/revision/(?P<revision>.+)", Handler.repo_info),
    (f"GET /api/models/{NAME}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", Handler.tree),
    (f"(HEAD|GET) /{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
    ("(HEAD|GET) /large/(?P<oid>[0-9a-f]+)", Handler.get_large),
]
