"""A server that speaks the part of the Hugging Face hub's HTTP API by which models are downloaded."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_INFO = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/revision/(?P<revision>[^/?]+)")
_TREE = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/?]+)")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/?]+)/(?P<path>.+)")


class HubServer:
    """Serves one folder as the model `name`, at the revisions `main`, `v1` and COMMIT."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.token = ""  # that one needs
        self.is_gated = False
        self.breaks = 0  # so many times a file of weights ends before its last tenth
        self.asked: list[tuple[str, str, str]] = []  # method, path, Range
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def files(self) -> list[str]:
        """The names of the files that were asked for, sorted."""
        found = (_FILE.fullmatch(path) for method, path, _ in self.asked if method == "GET")
        return sorted({match["path"] for match in found if match})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        match = _INFO.fullmatch(path) or _TREE.fullmatch(path) or _FILE.fullmatch(path)
        if match is None or match["name"] != self.hub.name:
            self._refuse(404, "RepoNotFound")
        elif self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(401, "RepoNotFound")
        elif self.hub.is_gated:
            self._refuse(403, "GatedRepo")
        elif match["revision"] not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif match.re is _INFO:
            self._json({"id": self.hub.name, "sha": COMMIT, "siblings": []})
        elif match.re is _TREE:
            self._json([self._entry(file) for file in self._all_files()])
        else:
            self._file(self.hub.folder / match["path"])

    def _all_files(self) -> list[Path]:
        return sorted(path for path in self.hub.folder.rglob("*") if path.is_file())

    def _entry(self, file: Path) -> dict[str, Any]:
        data = file.read_bytes()
        return {
            "type": "file",
            "path": file.relative_to(self.hub.folder).as_posix(),
            "size": len(data),
            "oid": hashlib.sha1(data).hexdigest(),
        }

    def _file(self, file: Path) -> None:
        if not file.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data = file.read_bytes()
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        part = data[first:]
        if file.suffix == ".safetensors" and self.hub.breaks:
            self.hub.breaks -= 1
            part = part[: len(part) * 9 // 10]
            self.close_connection = True
        self.wfile.write(part)

    def _json(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
