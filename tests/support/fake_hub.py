"""A fake Hugging Face Hub: the part of its HTTP API that model uploads use.

It stores every commit, and can be slow, return errors and interrupt uploads.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
BREAK = "break"  # close the connection in the middle of a request


@dataclass
class Repo:
    """A repository: content of files by branch and path; of commits, message, branch, and what was changed."""

    private: bool | None
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b"x"}})
    commits: list[dict[str, Any]] = field(default_factory=list)


class FakeHub:
    """The Hub of a test.

    ``faults``: part of "METHOD path" -> responses to the next matching requests, a status or BREAK. ``pause``: seconds
    before each response to a path that contains ``pause_on``.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.faults: dict[str, list[int | str]] = {}
        self.role, self.pause, self.pause_on = "write", 0.0, "/"
        self.blobs: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            fake = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[FakeHub]:
        """Run the server within this context."""
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """Return the files of a branch, except those created by the Hub."""
        return {n: c for n, c in self.repos[repo].branches[branch].items() if n != ".gitattributes"}

    def count(self, part: str) -> int:
        """Return the number of requests that contain this text in "METHOD path"."""
        return sum(part in request for request in self.requests)


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm, wbufsize = True, 1 << 16  # otherwise each response waits 40 ms for an acknowledgment

    def log_message(self, *args: Any) -> None:
        """Do not log."""

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PUT(self) -> None:
        self._handle("PUT")

    def _handle(self, method: str) -> None:
        hub, path = self.fake, unquote(urlsplit(self.path).path)
        line = f"{method} {path}"
        hub.requests.append(line)
        if hub.pause_on in line:
            time.sleep(hub.pause)
        for part, answers in hub.faults.items():
            if part in line and answers:
                fault = answers.pop(0)
                if fault == BREAK:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                self._body()
                return self._answer({"error": f"made to fail with {fault}"}, int(fault))
        body = self._body()
        if path.startswith("/lfs/"):
            if hashlib.sha256(body).hexdigest() != path.removeprefix("/lfs/"):
                return self._answer({"error": "not what was announced"}, 400)
            hub.blobs[path.removeprefix("/lfs/")] = body
            return self._answer({})
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        hub.tokens.add(token)
        if token != TOKEN:
            return self._answer({"error": "Invalid credentials"}, 401)
        self._answer(*self._api(path, body))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, content: Any, status: int = 200, code: str | None = None) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(text)

    def _api(self, path: str, body: bytes) -> tuple[Any, ...]:
        hub = self.fake
        if path == "/api/whoami-v2":
            return ({"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": hub.role}}},)
        if path == "/api/validate-yaml":
            return ({"errors": [], "warnings": []},)
        if path == "/api/repos/create":
            return self._created(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return (self._batch(json.loads(body)),)
        owner, name, *rest = path.removeprefix("/api/models/").split("/", 3)
        repo = hub.repos.get(f"{owner}/{name}")
        if repo is None:
            return {"error": "Repository not found"}, 404, "RepoNotFound"
        what, branch = rest[0] if rest else "info", rest[1] if len(rest) > 1 else "main"
        if what == "branch":
            if branch in repo.branches:
                return {"error": "Reference already exists"}, 409
            repo.branches[branch] = dict(repo.branches["main"])
            return ({},)
        if branch not in repo.branches:
            return {"error": "Invalid rev id"}, 404, "RevisionNotFound"
        files = repo.branches[branch]
        if what == "preupload":
            return (self._modes(json.loads(body), files),)
        if what == "commit":
            return self._committed(f"{owner}/{name}", repo, branch, body)
        if what == "tree":
            return ([{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in files.items()],)
        return ({"id": f"{owner}/{name}", "sha": "0" * 40, "siblings": [], "tags": []},)

    def _created(self, asked: dict[str, Any]) -> tuple[Any, ...]:
        if asked.get("organization") not in (None, "me"):
            return {"error": "You don't have the rights to create a model under this namespace"}, 403
        name = f"me/{asked['name']}"
        if name in self.fake.repos:
            return {"error": "You already created this model repo", "url": f"{self.fake.url}/{name}"}, 409
        private = {"private": True, "public": False}.get(asked.get("visibility", ""), asked.get("private"))
        self.fake.repos[name] = Repo(private)
        return ({"url": f"{self.fake.url}/{name}", "name": name, "id": "1"},)

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        objects = []
        for one in asked["objects"]:
            found = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.fake.blobs:
                found["actions"] = {"upload": {"href": f"{self.fake.url}/lfs/{one['oid']}", "header": {}}}
            objects.append(found)
        return {"transfer": "basic", "objects": objects}

    @staticmethod
    def _modes(asked: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
        found = []
        for one in asked["files"]:
            mode = "lfs" if one["path"].endswith((".safetensors", ".bin")) else "regular"
            known = files.get(one["path"])
            oid = None
            if known is not None and mode == "lfs":
                oid = hashlib.sha256(known).hexdigest()
            elif known is not None:
                oid = hashlib.sha1(b"blob %d\0" % len(known) + known).hexdigest()
            found.append({"path": one["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": found}

    def _committed(self, name: str, repo: Repo, branch: str, body: bytes) -> tuple[Any, ...]:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        files, commit = repo.branches[branch], {"branch": branch, "added": [], "deleted": []}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                commit["message"] = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                commit["added"].append(value["path"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.fake.blobs:
                    return {"error": "LFS pointer to a file that does not exist"}, 400
                files[value["path"]] = self.fake.blobs[value["oid"]]
                commit["added"].append(value["path"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
                commit["deleted"].append(value["path"])
        repo.commits.append(commit)
        oid = f"{len(repo.commits):040x}"
        return ({"success": True, "commitOid": oid, "commitUrl": f"{self.fake.url}/{name}/commit/{oid}"},)
