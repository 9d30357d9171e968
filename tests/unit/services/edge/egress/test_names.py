"""The name that a connection asks for, out of whatever it sends."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.egress.names import HEAD_MAX, asked


def hello(name: str | None) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


HELLO = hello("Files.Example.org")


def in_records(data: bytes, size: int) -> bytes:
    """The same handshake in records of ``size`` bytes."""
    body = data[5:]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(data[:3] + len(p).to_bytes(2, "big") + p for p in pieces)


def test_the_name_of_a_real_handshake_is_found() -> None:
    assert asked(HELLO) == "files.example.org"
    assert asked(hello(None)) is False


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_handshake_cut_into_records_is_the_same(size: int) -> None:
    assert asked(in_records(HELLO, size)) == "files.example.org"


@given(st.integers(0, len(HELLO) - 1))
def test_a_part_is_no_answer_yet(cut: int) -> None:
    assert asked(HELLO[:cut]) is None


@given(st.binary(max_size=400))
def test_no_bytes_break_it(data: bytes) -> None:
    for head in (data, HELLO[:3] + data, HELLO[:60] + data, b"GET / HTTP/1.1\r\n" + data):
        found = asked(head)
        assert found is None or found is False or isinstance(found, str)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", "a.example"),
        (b"GET / HTTP/1.1\r\nA: b\r\nHOST:a.example:8080\r\n\r\n", "a.example"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\n", None),
        (b"GET / HTTP/1.1\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n", False),
        (b"GET http://b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", False),
        (b"CONNECT b.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n", False),
        (b"SSH-2.0-OpenSSH\r\n", False),
        (b"", None),
        (b"GE", None),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * HEAD_MAX, False),
    ],
)
def test_the_host_of_a_request_is_found(head: bytes, name: str | bool | None) -> None:
    assert asked(head) == name
