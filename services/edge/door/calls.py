"""What an ``exec`` subject and its headers say. Pure.

Owns: taking them apart and the rule for reply subjects. The bus lets only a client with
the grant publish on the subject, and only a principal itself with its name at the end:
so project and principal are believed, and nothing in a body is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import get_args

import msgspec

from schemas.exec import HEADER_HAVE, HEADER_LEASE, HEADER_OFFSET, ExecVerb
from shared.errors import InvalidRequest

VERBS = frozenset(get_args(ExecVerb))
USES = frozenset({"i", "f", "s", "z"})
"""Frames by which a client uses what runs in a sandbox: a paused one goes on."""
_TOKENS = 8
COUNT_DIGITS_MAX = 20
SUBJECTS = 4_096
"""Whose parts are remembered: a client sends thousands of messages to the same few."""
_WILD = frozenset({"*", ">", ""})


class Call(msgspec.Struct, frozen=True):
    """One message at the door."""

    project: str
    node: str
    uid: str
    verb: str
    principal: str


@lru_cache(maxsize=SUBJECTS)
def parse(subject: str) -> Call | None:
    """The parts of ``dsec.exec.v1.<project>.<node>.<uid>.<verb>.<principal>``; ``None``
    for anything else."""
    parts = subject.split(".")
    if len(parts) != _TOKENS or parts[:3] != ["dsec", "exec", "v1"] or not all(parts):
        return None
    if parts[6] not in VERBS:
        return None
    return Call(parts[3], parts[4], parts[5], parts[6], parts[7])


def may_reply(call: Call, reply: str) -> bool:
    """Whether answers may go to ``reply``: only to the caller's own subjects."""
    prefix = f"dsec.out.v1.{call.node}.{call.principal}."
    connection, _, operation = reply[len(prefix) :].partition(".")
    return (
        reply.startswith(prefix)
        and connection not in _WILD
        and operation not in _WILD
        and "." not in operation
    )


def holder(call: Call, headers: Mapping[str, str]) -> str:
    """Under whose lease a request is made, "" without one."""
    lease = headers.get(HEADER_LEASE)
    return f"{call.principal}/{lease}" if lease else ""


def fingerprint(call: Call, body: bytes) -> bytes:
    """What makes two requests with one operation id the same request."""
    seed = f"{call.uid}\n{call.verb}\n{call.principal}\n".encode()
    return hashlib.sha256(seed + body).digest()


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < COUNT_DIGITS_MAX


def offset(text: str | None) -> int | None:
    """Where a frame of input belongs."""
    if text is None:
        return None
    if not _is_count(text):
        raise InvalidRequest("an offset is a decimal number", field=HEADER_OFFSET)
    return int(text)


def have(text: str) -> tuple[int, int]:
    """What output a client has that asks again."""
    counts = text.split(" ")
    if len(counts) != 2 or not all(map(_is_count, counts)):
        raise InvalidRequest("two decimal numbers", field=HEADER_HAVE)
    return int(counts[0]), int(counts[1])
