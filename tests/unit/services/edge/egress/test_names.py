"""The name that a connection asks for, out of whatever it sends."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.egress import names
from services.edge.egress.names import HEAD_MAX, RECORDS_MAX, Head, asked


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


@pytest.mark.parametrize("size", [-(-len(HELLO) // RECORDS_MAX), 100, 200])
def test_a_handshake_cut_into_records_is_the_same(size: int) -> None:
    assert asked(in_records(HELLO, size)) == "files.example.org"


@pytest.mark.parametrize("head", [in_records(HELLO, 7), HELLO[:3] + b"\0\0" + HELLO])
def test_records_that_only_cost_time_are_no_handshake(head: bytes) -> None:
    assert asked(head) is False


@pytest.mark.parametrize(
    "head", [HELLO, in_records(HELLO, 100), b"GET / HTTP/1.1\r\nHost: Files.Example.org\r\n\r\n"]
)
@pytest.mark.parametrize("size", [1, 2, 3, 50, 1000])
def test_bytes_that_come_singly_are_read_a_few_times(
    head: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def counted(data: bytes) -> names.Found:
        reads.append(len(data))
        return asked(data)

    monkeypatch.setattr(names, "asked", counted)
    found, known = Head(), None
    for at in range(0, len(head), size):
        assert known is None
        known = found.add(head[at : at + size])
    assert known == "files.example.org" and found.whole == head
    assert len(reads) <= 2 * RECORDS_MAX


def test_a_head_without_an_end_says_no_name() -> None:
    head = Head()
    assert [head.add(b"GET / HTTP/1.1\r\nA: "), head.add(b"x" * HEAD_MAX)] == [None, False]


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
