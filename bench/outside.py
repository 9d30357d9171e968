"""An outside for sandboxes to reach: a namespace for the gate, and a host behind it.

Owns: making and removing both. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.edge.egress.namespaces import within

HOST, PORT = "198.51.100.10", 8080
UPLINK = "198.51.100.1"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def outside() -> Iterator[Path]:
    """The namespace to connect from; ``HOST`` takes connections and says nothing."""
    name = "dsec-b" + secrets.token_hex(3)
    up, out = f"{name}-up", f"{name}-out"
    try:
        for one in (up, out):
            _ip("netns", "add", one)
            _ip("-n", one, "link", "set", "lo", "up")
        _ip("-n", up, "link", "add", "wan", "type", "veth", "peer", "name", "wan", "netns", out)
        for one, address in ((up, UPLINK), (out, HOST)):
            _ip("-n", one, "address", "add", f"{address}/24", "dev", "wan")
            _ip("-n", one, "link", "set", "wan", "up")
        with within(Path("/var/run/netns", out), _listener) as listener:
            threading.Thread(target=_take, args=(listener,), daemon=True).start()
            yield Path("/var/run/netns", up)
            listener.shutdown(socket.SHUT_RDWR)
    finally:
        for one in (up, out):
            subprocess.run(["ip", "netns", "del", one], check=False, capture_output=True)


def _listener() -> socket.socket:
    return socket.create_server((HOST, PORT), backlog=512)


def _take(listener: socket.socket) -> None:
    held = []
    while True:
        try:
            held.append(listener.accept()[0])
        except OSError:
            break
    for one in held:
        one.close()
