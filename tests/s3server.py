"""An S3 server for tests: moto's, in a process of its own, on a free port."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import obstore
from obstore.store import S3Store

from devstack.process import free_port
from shared.blobs.opening import StoreSettings

UP_S = 60.0
BUCKET = "layers"
KEY_ID, SECRET = "test-key-id", "test-secret-canary"


@dataclass
class S3Server:
    """A running server with one bucket. ``stop`` and ``start`` keep the port, not the data."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self, prefix: str) -> dict[str, str]:
        """Values for the fields of :class:`StoreSettings`."""
        return {
            "store_url": f"s3://{BUCKET}/{prefix}", "store_endpoint": self.endpoint,
            "store_key_id": KEY_ID, "store_secret": SECRET,
        }  # fmt: skip

    def store_settings(self, prefix: str) -> StoreSettings:
        return StoreSettings(**self.settings(prefix))  # type: ignore[arg-type]

    @property
    def objects(self) -> S3Store:
        """The bucket, past our own code."""
        return S3Store(
            BUCKET, endpoint=self.endpoint, access_key_id=KEY_ID, secret_access_key=SECRET,
            region="us-east-1", client_options={"allow_http": True},
        )  # fmt: skip

    def get(self, key: str) -> bytes:
        return bytes(obstore.get(self.objects, key).bytes())

    def put(self, key: str, content: bytes) -> None:
        obstore.put(self.objects, key, content)

    def delete(self, key: str) -> None:
        obstore.delete(self.objects, key)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    port = free_port()
    server = S3Server(port, _start(port))
    try:
        bucket = urllib.request.Request(f"{server.endpoint}/{BUCKET}", data=b"", method="PUT")
        urllib.request.urlopen(bucket).close()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(UP_S)


def _start(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(64 << 20)},
    )  # fmt: skip
    deadline = time.monotonic() + UP_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/").close()
            return process
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise
            time.sleep(0.05)
