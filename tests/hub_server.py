"""Runs a small HTTP server that answers as the hub does, for models and data sets."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"

GATED = b"only after the terms are accepted"


class Hub(ThreadingHTTPServer):
    """Holds repositories by name, each a table of file name -> content; `refusals` answers for a repository instead."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.sent: list[str] = []  # files fetched
        self.requests = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests += 1
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[0] == "api"
        first = 2 if api else int(parts[0] == "datasets")
        name, rest = "/".join(parts[first : first + 2]), parts[first + 2 :]
        status, code = self.server.refusals.get(name, (200, ""))
        files = self.server.repositories.get(name)
        if status == 200 and files is None:
            status, code = 404, "RepoNotFound"
        elif status == 200 and len(rest) > 1 and rest[1] not in ("main", COMMIT):
            status, code = 404, "RevisionNotFound"
        if status != 200:
            self._send(status, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"})
        elif api:
            self._api(name, rest, files or {})
        else:
            self._file("/".join(rest[2:]), files or {})

    def _api(self, name: str, rest: list[str], files: dict[str, bytes]) -> None:
        answer: object = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
        if rest[:1] == ["tree"]:
            answer = _listing(files, "/".join([*rest[2:], ""]), whole="recursive=true" in self.path.lower())
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, file: str, files: dict[str, bytes]) -> None:
        if files.get(file) == GATED:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        if file not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            self.server.sent.append(file)
        tag = hashlib.sha1(files[file]).hexdigest()
        self._send(200, files[file], {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _listing(files: dict[str, bytes], folder: str, *, whole: bool) -> list[dict[str, object]]:
    """Lists what a folder holds: all files below it, or its own files and folders."""
    found: dict[str, dict[str, object]] = {}
    for file, content in files.items():
        rest = file.removeprefix(folder)
        if file.startswith(folder) and (whole or "/" not in rest):
            found[file] = {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        elif file.startswith(folder):
            path = folder + rest.partition("/")[0]
            found[path] = {"type": "directory", "path": path, "oid": "0"}
    return list(found.values())
