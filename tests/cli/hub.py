"""A Hugging Face hub on this machine, with the repositories that a test gives it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40

Files = Mapping[str, bytes]


@contextmanager
def hub_of(repositories: Mapping[str, Files]) -> Iterator[str]:
    """The address of a hub with the files of these repositories."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            content = self._content(self.path.partition("?")[0].removeprefix("/"))
            if content is None:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._send(content, body=body)

        def _content(self, path: str) -> bytes | None:
            for name, files in repositories.items():
                if path.startswith(f"api/models/{name}/tree/"):
                    return json.dumps(_tree(files)).encode()
                if path == f"api/models/{name}" or path.startswith(f"api/models/{name}/revision"):
                    siblings = [
                        {"rfilename": file, "size": len(content)} for file, content in files.items()
                    ]
                    described = {"id": name, "sha": COMMIT, "siblings": siblings}
                    return json.dumps(described).encode()
                for file, content in files.items():
                    if path.startswith(f"{name}/resolve/") and path.endswith(f"/{file}"):
                        return content
            return None

        def _send(self, content: bytes, *, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{_digest(content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _tree(files: Files) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
        for name, content in files.items()
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
