"""A registry for tests: the reading half of the OCI distribution API, made to fail at will."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

ACCOUNT = "reader:p4ss-canary"
TOKEN = "token-canary"
OCI = "application/vnd.oci.image"


@dataclass
class Registry:
    """What is in it and how it behaves. ``log``: path and ``Range`` of each request."""

    port: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    auth: Literal["none", "basic", "token"] = "none"
    cut_at: int = 0
    """The next ``cuts`` blobs break off after so many bytes of the answer."""
    cuts: int = 0
    ranges: bool = True
    busy: int = 0
    """So many requests are answered 503."""
    log: list[tuple[str, str]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def allowed(self) -> str:
        """For ``DSEC_IMAGE_REGISTRIES``."""
        return f"http://{self.host}"

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def manifest(self, document: dict[str, Any], media_type: str, *tags: str) -> dict[str, Any]:
        data = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        for reference in (digest, *tags):
            self.manifests[reference] = (media_type, data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def image(
        self, layers: list[tuple[bytes, str]], config: bytes, *tags: str, suffix: str = OCI
    ) -> dict[str, Any]:
        """An image of ``(blob, media type)`` layers under ``tags``."""
        manifest = {
            "schemaVersion": 2,
            "config": self.blob(config, f"{OCI}.config.v1+json"),
            "layers": [self.blob(data, kind) for data, kind in layers],
        }
        return self.manifest(manifest, f"{suffix}.manifest.v1+json", *tags)

    @contextmanager
    def serving(self) -> Iterator[Registry]:
        server = _Server(("127.0.0.1", 0), _Handler)
        server.registry = self
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    registry: Registry

    def handle_error(self, *_: object) -> None:
        """A client that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.registry.log.append((self.path, self.headers.get("Range", "")))
        if self.path.startswith("/token"):
            self._token()
        elif self.server.registry.busy:
            self.server.registry.busy -= 1
            self._send(503, b"later")
        elif not self._known():
            self._challenge()
        else:
            self._serve(self.path.split("/"))

    def _known(self) -> bool:
        given = self.headers.get("Authorization")
        basic = "Basic " + base64.b64encode(ACCOUNT.encode()).decode()
        wanted = {"none": given, "basic": basic, "token": f"Bearer {TOKEN}"}
        return given == wanted[self.server.registry.auth]

    def _challenge(self) -> None:
        realm = f'Bearer realm="http://{self.server.registry.host}/token",service="s",scope="repo:pull"'
        says = 'Basic realm="r"' if self.server.registry.auth == "basic" else realm
        self._send(401, b"{}", {"WWW-Authenticate": says})

    def _token(self) -> None:
        basic = "Basic " + base64.b64encode(ACCOUNT.encode()).decode()
        asked = parse_qs(urlsplit(self.path).query)
        good = self.headers.get("Authorization") == basic and asked["scope"] == ["repo:pull"]
        self._send(200 if good else 401, json.dumps({"token": TOKEN}).encode())

    def _serve(self, parts: list[str]) -> None:
        kind, reference = parts[-2:]
        if kind == "manifests" and reference in self.server.registry.manifests:
            media_type, data = self.server.registry.manifests[reference]
            self._send(200, data, {"Content-Type": media_type})
        elif kind == "blobs" and reference in self.server.registry.blobs:
            self._blob(self.server.registry.blobs[reference])
        else:
            self._send(404, b"{}")

    def _blob(self, data: bytes) -> None:
        start = 0
        if self.server.registry.ranges and (asked := self.headers.get("Range")):
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        cut = None
        if self.server.registry.cuts and len(data) - start > self.server.registry.cut_at:
            self.server.registry.cuts -= 1
            cut = self.server.registry.cut_at
        self._send(206 if start else 200, data[start:], cut=cut)

    def _send(
        self, code: int, data: bytes, headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:  # fmt: skip
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True
