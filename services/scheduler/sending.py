"""Changes as messages: starts and operations per node, events, replies. Pure.

Owns: coalescing and cutting to what the bus carries. Does not own: when they are
sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from schemas.base import HEADER_TRACE, VERSION, encode, portions
from schemas.sandbox import (
    CreateReply,
    EdgeOp,
    EdgeOpItem,
    ItemResult,
    OpReply,
    SandboxEvent,
    StartItem,
)  # fmt: skip
from schemas.subjects import cmd, evt_sandbox
from services.scheduler.model import NodeOp, Sandbox, result_of
from shared import lifecycle as life
from shared.bus import Outgoing

MAX_STARTS = 1024
"""Starts in one message."""
MAX_SPEC_BYTES = 2 * 1024 * 1024
"""Bytes of specs in one message, unless one spec alone is larger."""
MAX_OP_ITEMS = 4096
"""Operations in one message, and"""
MAX_RESULTS = 8192
"""results in one reply, as far as its bytes allow."""

SpecKey = tuple[str, int]


def _headers(trace: str | None) -> dict[str, str]:
    return {HEADER_TRACE: trace} if trace else {}


def starts(
    rows: Iterable[Sandbox], specs: Mapping[SpecKey, bytes], trace: str | None
) -> list[Outgoing]:
    """``EdgeStart`` messages. ``specs`` are encoded ``ResolvedSpec``s; each travels
    once per message."""
    by_node: dict[str, list[Sandbox]] = defaultdict(list)
    for row in rows:
        by_node[row.node or ""].append(row)
    out: list[Outgoing] = []
    for node in sorted(by_node):
        out += _starts_of(node, by_node[node], specs, trace)
    return out


def _starts_of(
    node: str, rows: list[Sandbox], specs: Mapping[SpecKey, bytes], trace: str | None
) -> list[Outgoing]:
    out: list[Outgoing] = []
    index: dict[SpecKey, int] = {}
    items: list[StartItem] = []
    size = 0

    def flush() -> None:
        nonlocal size
        if not items:
            return
        body = {"v": VERSION, "specs": [msgspec.Raw(specs[k]) for k in index], "starts": items}
        out.append(Outgoing(cmd("edge", "start", node), encode(body), _headers(trace)))
        index.clear()
        items.clear()
        size = 0

    for row in rows:
        key = (row.request_id or "", row.spec_idx)
        new = 0 if key in index else len(specs[key])
        if len(items) >= MAX_STARTS or (size and size + new > MAX_SPEC_BYTES):
            flush()
            new = len(specs[key])
        size += new
        spec = index.setdefault(key, len(index))
        items.append(
            StartItem(
                uid=row.uid, project=row.project, generation=row.generation, spec=spec,
                expires_at=row.expires_at, principal=row.principal, trace=row.trace,
            )
        )  # fmt: skip
    flush()
    return out


def node_ops(ops: Sequence[NodeOp], trace: str | None) -> list[Outgoing]:
    """``EdgeOp`` messages, one per verb and node as far as it goes."""
    groups: dict[tuple[str, str], list[EdgeOpItem]] = defaultdict(list)
    for op in ops:
        groups[op.node, op.verb].append(
            EdgeOpItem(
                uid=op.uid, project=op.project, generation=op.generation, cause=op.cause,
                grace_s=op.grace_s, ttl_running_stop=op.ttl_running_stop,
                deadline_s=op.deadline_s, trace=op.trace, tighten=op.tighten,
                asked_at=op.asked_at,
            )
        )  # fmt: skip
    out = []
    for (node, verb), items in groups.items():
        for part in portions(map(encode, items), count=MAX_OP_ITEMS):
            data = encode(EdgeOp(items=_raw(part)))
            out.append(Outgoing(cmd("edge", verb, node), data, _headers(trace)))
    return out


def _raw(part: list[bytes]) -> Any:
    """A portion as a field of its message."""
    return [msgspec.Raw(item) for item in part]


def events(found: Iterable[SandboxEvent], trace: str | None) -> list[Outgoing]:
    """One message an event: they are addressed by state and uid."""
    headers = _headers(trace)
    return [Outgoing(evt_sandbox(e.project, e.state, e.uid), encode(e), headers) for e in found]


def settles(was: Sandbox | None, row: Sandbox) -> bool:
    """Whether this change is what the client that created the sandbox waits for."""
    if was is not None and (was.running_at is not None or was.terminal):
        return False
    return row.state == life.RUNNING or row.terminal or row.running_at is not None


def create_replies(rows: Iterable[Sandbox]) -> list[Outgoing]:
    """``CreateReply`` messages for rows that have a reply subject."""
    groups: dict[tuple[str, str, int], list[ItemResult]] = defaultdict(list)
    for row in rows:
        if row.reply_to and row.request_id:
            groups[row.reply_to, row.request_id, row.total].append(result_of(row))
    out = []
    for (reply_to, request_id, total), results in groups.items():
        for part in portions(map(encode, results), count=MAX_RESULTS):
            reply = CreateReply(request_id=request_id, total=total, results=_raw(part))
            out.append(Outgoing(reply_to, encode(reply)))
    return out


def op_replies(reply_to: str, request_id: str, results: list[ItemResult]) -> list[Outgoing]:
    """The ``OpReply`` messages of an operation; the final one says that it is the last."""
    parts = list(portions(map(encode, results), count=MAX_RESULTS)) or [[]]
    out = []
    for number, part in enumerate(parts, 1):
        last = number == len(parts)
        reply = OpReply(request_id=request_id, results=_raw(part), last=last)
        out.append(Outgoing(reply_to, encode(reply)))
    return out
