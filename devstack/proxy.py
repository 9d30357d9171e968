"""A TCP proxy that is made to fail: away, hanging, deaf, slow, cutting now and then."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Literal

PIECE = 65536


class Proxy:
    """Forwards to a port on loopback from its own ``port``, as ``mode`` says."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.mode: Literal["open", "away", "hang", "deaf"] = "open"
        """``deaf``: what the server sends is lost; end the connections afterwards."""
        self.delay_s = 0.0
        self.cut_every = 0
        """Every so manieth connection is cut inside its answer."""
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def drop(self) -> None:
        """Ends the connections that are there, so that the mode counts for all."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self.connections += 1
        number = self.connections
        self._open.add(client)
        try:
            with client:
                if self.mode == "away":
                    return
                with socket.create_connection(("127.0.0.1", self._target)) as server:
                    self._pump(client, server, number)
        except OSError:
            pass
        finally:
            self._open.discard(client)

    def _pump(self, client: socket.socket, server: socket.socket, number: int) -> None:
        while True:
            for end in select.select([client, server], [], [])[0]:
                data = end.recv(PIECE)
                while self.mode == "hang" and not self._closed:
                    time.sleep(0.02)
                if not data or self.mode == "away":
                    return
                if end is server and self.mode == "deaf":
                    continue
                if end is client and self.delay_s:
                    time.sleep(self.delay_s)
                if end is server and self.cut_every and number % self.cut_every == 0:
                    client.sendall(data[: len(data) // 2])
                    return
                (server if end is client else client).sendall(data)
