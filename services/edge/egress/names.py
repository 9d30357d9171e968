"""The name that the first bytes of a connection ask for. Pure.

Owns: reading a TLS ClientHello and the head of an HTTP/1 request, as untrusted bytes.
"""

from __future__ import annotations

import struct
from typing import Literal

HEAD_MAX = 64 * 1024
"""A connection that has not said its name by then says none."""
RECORDS_MAX = 16
"""Of TLS, into which a hello may be cut."""
HANDSHAKE, CLIENT_HELLO, SERVER_NAME, HOST_NAME = 22, 1, 0, 0
_METHODS = (
    b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ",
    b"TRACE ",
)  # fmt: skip
_METHOD_BYTES = max(map(len, _METHODS))
_BLANK = b"\r\n\r\n"

Found = str | Literal[False] | None
"""A name; ``False``: there is none and will be none; ``None``: more bytes are needed."""


def asked(head: bytes) -> Found:
    """The name in ``head``."""
    if not head:
        return None
    if head[0] == HANDSHAKE:
        return _checked(_server_name(head))
    if any(m.startswith(head[: len(m)]) for m in _METHODS):
        return _checked(_host(head))
    return False


class Head:
    """The first bytes of a connection as they come. They are read again only when what
    was missing is there: a client that sends byte by byte costs no more than another."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._wanted = 0

    @property
    def whole(self) -> bytes:
        return bytes(self._bytes)

    def add(self, data: bytes) -> Found:
        """The name, once it is known."""
        before = len(self._bytes)
        self._bytes += data
        size = len(self._bytes)
        if not size:
            return None
        if self._bytes[0] == HANDSHAKE:
            if size < min(self._wanted, HEAD_MAX):
                return None
            self._wanted = _records_end(self._bytes)
        elif (
            before >= _METHOD_BYTES and size < HEAD_MAX
            and self._bytes.find(_BLANK, before - len(_BLANK) + 1) < 0
        ):  # fmt: skip
            return None
        return asked(bytes(self._bytes))


def _records_end(head: bytearray) -> int:
    """How many bytes there must be to know more than from these."""
    at = 0
    for _ in range(RECORDS_MAX):
        if len(head) < at + 5:
            return at + 5
        at += 5 + int(struct.unpack_from(">H", head, at + 3)[0])
        if len(head) < at:
            return at
    return at


def _checked(found: Found) -> Found:
    if not isinstance(found, str):
        return found
    name = found.lower().rstrip(".")
    return (
        name if name and name.isascii() and all(c.isalnum() or c in "-._" for c in name) else False
    )


def _server_name(head: bytes) -> Found:
    hello = b""
    at = 0
    for _ in range(RECORDS_MAX):
        if len(head) < at + 5:
            return None if len(head) < HEAD_MAX else False
        kind, _, length = struct.unpack_from(">BHH", head, at)
        if kind != HANDSHAKE or not length:
            return False
        hello += head[at + 5 : at + 5 + length]
        at += 5 + length
        if len(hello) >= 4:
            if hello[0] != CLIENT_HELLO:
                return False
            whole = 4 + int.from_bytes(hello[1:4], "big")
            if whole > HEAD_MAX:
                return False
            if len(hello) >= whole:
                return _from_hello(hello[4:whole])
    return False


def _from_hello(hello: bytes) -> Found:
    try:
        return _named(hello)
    except (IndexError, struct.error, UnicodeDecodeError):
        return False


def _named(hello: bytes) -> Found:
    at = 2 + 32
    at += 1 + hello[at]
    at += 2 + int(struct.unpack_from(">H", hello, at)[0])
    at += 1 + hello[at]
    end = at + 2 + int(struct.unpack_from(">H", hello, at)[0])
    at += 2
    while at + 4 <= min(end, len(hello)):
        kind, length = struct.unpack_from(">HH", hello, at)
        at += 4
        if kind == SERVER_NAME:
            name_kind, size = struct.unpack_from(">BH", hello, at + 2)
            raw = hello[at + 5 : at + 5 + size]
            return raw.decode("ascii") if name_kind == HOST_NAME and len(raw) == size else False
        at += length
    return False


def _host(head: bytes) -> Found:
    lines, whole, _ = head.partition(_BLANK)
    if not whole:
        return None if len(head) < HEAD_MAX else False
    hosts = [
        line.partition(b":")[2].strip()
        for line in lines.split(b"\r\n")[1:]
        if line.partition(b":")[0].strip().lower() == b"host"
    ]
    if len(hosts) != 1:
        return False
    target = lines.split(b" ", 2)[1] if lines.count(b" ") else b""
    if not target.startswith(b"/") and target != b"*":
        return False  # a request to a proxy names another host than its header
    try:
        return hosts[0].decode("ascii").partition(":")[0]
    except UnicodeDecodeError:
        return False
