"""A client's message as auth's doors see it. Pure.

Owns: who asks for what, where the answer may go, its access record. Does not own:
what is done about it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import msgspec

from schemas.audit import Access
from schemas.subjects import ANONYMOUS

MAX_ID = 64
_INBOX = re.compile(r"^_INBOX\.[A-Za-z0-9._-]{1,200}\Z")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request or read. ``id`` is the same at every delivery of it; ``reply_to``
    is ``None`` where no answer is wanted or its subject is not the client's own."""

    id: str
    at: float
    project: str
    entity: str
    verb: str
    principal: str
    body: bytes
    reply_to: str | None = None
    trace: str | None = None

    @property
    def grant(self) -> str:
        """``entity.verb``."""
        return f"{self.entity}.{self.verb}"

    def access(
        self, outcome: str, *, target: str = "", request_id: str = "", count: int = 1
    ) -> Access:
        """The record of this ask with its outcome (``ok`` or an error code)."""
        return Access(
            id=self.id, at=self.at, project=self.project[:63], principal=self.principal,
            verb=self.grant[:63], outcome=outcome, entity=self.entity[:63], target=target,
            request_id=request_id, sha256=hashlib.sha256(self.body).hexdigest(),
            bytes=len(self.body), count=count, trace=self.trace or "",
        )  # fmt: skip


def own_inbox(reply_to: str | None, principal: str) -> str | None:
    """``reply_to`` if an answer may go there: auth may publish everywhere, so a client
    must not choose freely where its answers do."""
    if not reply_to or not _INBOX.match(reply_to):
        return None
    if principal != ANONYMOUS and not reply_to.startswith(f"_INBOX.{principal}."):
        return None
    return reply_to


class _Id(msgspec.Struct):
    request_id: str = ""


def request_id(body: bytes) -> str | None:
    """The request id of a body that is otherwise unreadable, if it can be found."""
    try:
        return msgspec.json.decode(body, type=_Id).request_id[:MAX_ID] or None
    except (msgspec.DecodeError, RecursionError):
        return None
