"""Docker Engine as the peer of images: the same files loaded from a local archive, and pulled
from a registry of ours with the store's latency; each with its first command.

Each has a file of its own, so that the engine has none of its layers from anywhere else. The
archive is kind to Docker: nothing is fetched. The registry's layer is compressed as a push
would (gzip, the fastest level); our store's layers are not.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copyfileobj
from threading import Thread
from typing import Any

import docker

from bench.docker_peer import LABEL

IMAGE = "dsec-bench-image:1"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


@dataclass(frozen=True)
class Loaded:
    """Seconds of ``docker load``, with ``docker run`` after it; the image's bytes."""

    load_s: float
    load_run_s: float
    image_bytes: int


def saved(tree: Path, archive: Path) -> None:
    """The tree as an image in ``archive``, as ``docker save`` writes it."""
    client = docker.from_env(timeout=300)
    with _tar(tree, archive.parent) as tar:
        name, tag = IMAGE.split(":")
        client.api.import_image_from_stream(tar.stdout, repository=name, tag=tag)
    with archive.open("wb") as file:
        for piece in client.images.get(IMAGE).save(named=True):
            file.write(piece)
    client.images.remove(IMAGE, force=True)


def _tar(tree: Path, work: Path) -> subprocess.Popen[bytes]:
    """What packs the tree and one file more; its output is the archive."""
    own = work / f"own-{secrets.token_hex(4)}"
    own.mkdir()
    (own / ".dsec-bench").write_text(own.name)
    words = ["tar", "-c", "-C", str(tree), ".", "-C", str(own), "./.dsec-bench"]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def loaded(archive: Path, command: Sequence[str]) -> Loaded:
    """``docker load`` of the archive, ``docker run`` of the command."""
    client = docker.from_env(timeout=300)
    began = time.perf_counter()
    with archive.open("rb") as file:
        client.images.load(file)
    load_s = time.perf_counter() - began
    _run(client, IMAGE, command)
    took = time.perf_counter() - began
    size = int(client.images.get(IMAGE).attrs["Size"])
    client.images.remove(IMAGE, force=True)
    return Loaded(load_s, took, size)


def pulled(tree: Path, work: Path, command: Sequence[str], *, delay_s: float) -> float:
    """Seconds of ``docker pull`` from a registry whose answers begin after ``delay_s``, and
    ``docker run`` of the command."""
    client = docker.from_env(timeout=300)
    with _registry(_image(tree, work), delay_s) as host:
        reference = f"{host}/dsec-bench"
        began = time.perf_counter()
        client.images.pull(reference, tag="1")
        _run(client, f"{reference}:1", command)
        took = time.perf_counter() - began
        client.images.remove(f"{reference}:1", force=True)
    return took


def _run(client: docker.DockerClient, image: str, command: Sequence[str]) -> None:
    client.containers.run(
        image, list(command), network_mode="none", remove=True, labels={LABEL: "1"}
    )


@dataclass(frozen=True)
class _Blob:
    kind: str
    content: Path | bytes

    @property
    def size(self) -> int:
        if isinstance(self.content, Path):
            return self.content.stat().st_size
        return len(self.content)


def _image(tree: Path, work: Path) -> dict[str, _Blob]:
    """What the registry has, by digest and tag."""
    layer = work / "layer.tar.gz"
    plain = hashlib.sha256()
    with (
        layer.open("wb") as out,
        _tar(tree, work) as tar,
        subprocess.Popen(["gzip", "-1"], stdin=subprocess.PIPE, stdout=out) as packer,
    ):
        assert tar.stdout is not None and packer.stdin is not None
        while piece := tar.stdout.read(1 << 20):
            plain.update(piece)
            packer.stdin.write(piece)
        packer.stdin.close()
    config = {
        "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{plain.hexdigest()}"]},
    }  # fmt: skip
    blobs: dict[str, _Blob] = {}

    def add(blob: _Blob) -> dict[str, Any]:
        if isinstance(blob.content, bytes):
            digest = hashlib.sha256(blob.content)
        else:
            with blob.content.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
        name = f"sha256:{digest.hexdigest()}"
        blobs[name] = blob
        return {"mediaType": blob.kind, "size": blob.size, "digest": name}

    manifest = {
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": add(_Blob(CONFIG, json.dumps(config).encode())),
        "layers": [add(_Blob(LAYER, layer))],
    }  # fmt: skip
    document = _Blob(MANIFEST, json.dumps(manifest).encode())
    add(document)
    return blobs | {"1": document}


@contextmanager
def _registry(blobs: dict[str, _Blob], delay_s: float) -> Iterator[str]:
    """Serves ``blobs`` on loopback; yields its host. Engines trust such a one without TLS."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            time.sleep(delay_s)
            name = self.path.rpartition("/")[2]
            blob = blobs.get(name) or _Blob("application/json", b"{}")
            self.send_response(200 if name in blobs or self.path == "/v2/" else 404)
            self.send_header("Content-Type", blob.kind)
            self.send_header("Content-Length", str(blob.size))
            if name in blobs:
                digest = next(known for known, one in blobs.items() if one is blob)
                self.send_header("Docker-Content-Digest", digest)
            self.end_headers()
            if self.command == "HEAD":
                return
            if isinstance(blob.content, bytes):
                self.wfile.write(blob.content)
            else:
                with blob.content.open("rb") as file:
                    copyfileobj(file, self.wfile, 1 << 20)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
