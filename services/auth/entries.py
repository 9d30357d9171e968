"""Requests other than iam ones: read, and turned into commands. Pure.

Owns: which body goes with which subject, and the commands' form. Does not own:
transactions and charges (:mod:`services.auth.handlers`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from schemas.audit import Access, AuditReport, SandboxReport
from schemas.base import HEADER_REPLY, HEADER_TRACE, BadMessage, decode, encode
from schemas.image import ImageCommand, ImageCreate, ImageDelete, ImageTag, SnapshotCreate
from schemas.job import JobCommand, JobRequest, JobVerb
from schemas.node import NodeCommand
from schemas.sandbox import OpCommand, SandboxOpRequest, Verb
from schemas.subjects import cmd
from services.auth import creates
from services.auth.access import targets
from services.auth.asks import MAX_ID, Ask, request_id
from services.auth.creates import Create, Refusal
from services.auth.store import RequestRow
from shared import policies
from shared.bus import Outgoing
from shared.errors import DsecError, InvalidRequest, Unsupported
from shared.wire import bad_message

COMMAND_BYTES = 1024 * 1024
"""About how much one message of commands carries."""
OPS = frozenset(get_args(Verb))
CREATES = frozenset({"sandbox.create", "sandbox.fork"})
JOB_VERBS = frozenset(get_args(JobVerb))
NODE_VERBS = frozenset({"cordon", "uncordon", "drain"})
IMAGE_VERBS: dict[str, type[Any]] = {
    "create": ImageCreate, "delete": ImageDelete, "tag": ImageTag,
}  # fmt: skip


@dataclass(slots=True)
class Entry:
    """One request on its way: its idempotency ``key`` and content ``digest``, the
    judged ``create`` or another ``command``, or the ``error`` that refuses it. ``projects``: its
    project and the ancestors, nearest first."""

    ask: Ask
    key: str = ""
    digest: bytes = b""
    request_id: str = ""
    target: str = ""
    count: int = 1
    create: Create | None = None
    command: Any = None
    error: DsecError | None = None
    projects: Sequence[str] = ()

    def row(self) -> RequestRow:
        """How the request is remembered."""
        ask = self.ask
        return RequestRow(self.key, ask.project, ask.principal, ask.grant, self.digest)

    def access(self) -> Access:
        """Its access record. Of a create with refused items ``count`` is what was
        admitted; the outcome is an error's only where nothing was."""
        outcome, count = "ok", self.count
        if self.error is not None:
            outcome = self.error.code
        elif self.create is not None:
            count = self.create.total - len(self.create.refused)
            if count == 0:
                outcome, count = self.create.refused[0].code, self.create.total
        return self.ask.access(
            outcome, target=self.target, request_id=self.request_id, count=count
        )


def prepare(ask: Ask, *, max_bytes: int) -> Entry:
    """Reads a request; what is wrong with it as a whole is in ``error``."""
    entry = Entry(ask)
    try:
        if len(ask.body) > max_bytes:
            raise InvalidRequest(
                f"a request of {len(ask.body)} bytes, at most {max_bytes}", field="payload"
            )
        _read(entry)
    except BadMessage as exc:
        entry.error = bad_message(exc)
        entry.request_id = request_id(ask.body) or ""
    except DsecError as exc:
        entry.error = exc
        entry.request_id = request_id(ask.body) or ""
    return entry


def _read(entry: Entry) -> None:
    ask = entry.ask
    if ask.grant in CREATES:
        fork = ask.verb == "fork"
        create = creates.read(ask.project, ask.principal, ask.body, fork=fork)
        entry.create, entry.digest = create, create.digest
        # the id is also the first sandbox's uid, so it is unique over all projects
        entry.request_id = entry.key = entry.target = create.request.request_id
        return
    entry.digest = hashlib.sha256(ask.body).digest()
    if ask.entity == "sandbox" and ask.verb in OPS:
        _read_op(entry)
    elif ask.grant == "sandbox.snapshot":
        snapshot = decode(ask.body, SnapshotCreate)
        entry.command, entry.target = snapshot, snapshot.uid
        _identify(entry, snapshot.request_id)
    elif ask.grant == "sandbox.report":
        report = decode(ask.body, SandboxReport)
        entry.command, entry.target = report, report.uid
        _identify(entry, report.request_id)
    elif ask.entity == "job" and ask.verb in JOB_VERBS:
        lease = decode(ask.body, JobRequest)
        entry.command, entry.target = lease, lease.job
        _identify(entry, lease.request_id)
    elif ask.entity == "node" and ask.verb in NODE_VERBS:
        node = decode(ask.body, NodeCommand)
        entry.command = msgspec.structs.replace(node, verb=ask.verb)
        entry.target = node.node
        _identify(entry, node.request_id)
    elif ask.entity == "image" and ask.verb in IMAGE_VERBS:
        _read_image(entry)
    else:
        raise Unsupported(f"there is no {ask.grant}", field="verb")


def _read_op(entry: Entry) -> None:
    request = decode(entry.ask.body, SandboxOpRequest)
    if not (request.uids or request.job or request.labels):
        raise InvalidRequest("name sandboxes by uids, job or labels", field="uids")
    timed = request.ttl_running_stop is not None or request.deadline_s is not None
    if timed != (entry.ask.verb == "set_timeout"):
        raise InvalidRequest(
            "set_timeout, and only that, takes ttl_running_stop or deadline_s",
            field="ttl_running_stop",
        )
    if (request.tighten is not None) != (entry.ask.verb == "tighten"):
        raise InvalidRequest("tighten, and only that, takes tighten", field="tighten")
    policies.tightened(policies.Policy(), request.tighten)
    entry.command = request
    entry.target = targets(request.uids) if request.uids else (request.job or "")
    entry.count = max(1, len(request.uids))
    _identify(entry, request.request_id)


def _read_image(entry: Entry) -> None:
    body: Any = decode(entry.ask.body, IMAGE_VERBS[entry.ask.verb])
    entry.command, entry.target = body, body.name
    _identify(entry, body.request_id)


def _identify(entry: Entry, request: str) -> None:
    if not 0 < len(request) <= MAX_ID:
        raise InvalidRequest(f"1 to {MAX_ID} characters", field="request_id")
    entry.request_id = request
    entry.key = f"{entry.ask.project}/{request}"


def messages(entries: Sequence[Entry], *, now: float) -> list[Outgoing]:
    """The commands of all admitted entries, in order, neighbours together."""
    out: list[Outgoing] = []
    good = (e for e in entries if e.error is None)
    for kind, group in itertools.groupby(good, _kind):
        if kind == "create":
            out += _creates(group, now)
        elif kind == "op":
            out += _ops(group)
        else:
            out += [_single(e) for e in group]
    return out


def _kind(entry: Entry) -> str:
    if entry.create is not None:
        return "create"
    return "op" if entry.ask.entity == "sandbox" and entry.ask.verb in OPS else "single"


def _creates(entries: Iterable[Entry], now: float) -> list[Outgoing]:
    def encoded() -> Iterator[tuple[str, bytes]]:
        for entry in entries:
            create = entry.create
            assert create is not None
            for piece in creates.pieces(
                create, expires_at=now + create.request.timeout_s,
                reply_to=entry.ask.reply_to, trace=entry.ask.trace, asked_at=entry.ask.at,
            ):  # fmt: skip
                yield entry.request_id, encode(piece)

    return [
        Outgoing(cmd("sandbox", "create", key), encode({"v": 1, "commands": commands}))
        for key, commands in _packed(encoded())
    ]


def _packed(parts: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, list[msgspec.Raw]]]:
    key, size = "", 0
    held: list[msgspec.Raw] = []
    for name, data in parts:
        if held and size + len(data) > COMMAND_BYTES:
            yield key, held
            held, size = [], 0
        if not held:
            key = name
        held.append(msgspec.Raw(data))
        size += len(data)
    if held:
        yield key, held


def _ops(entries: Iterable[Entry]) -> list[Outgoing]:
    parts = (
        (
            entry.request_id,
            encode(
                OpCommand(
                    project=entry.ask.project, principal=entry.ask.principal,
                    verb=entry.ask.verb, request=entry.command,  # type: ignore[arg-type]
                    reply_to=entry.ask.reply_to, trace=entry.ask.trace,
                    asked_at=entry.ask.at,
                )
            ),
        )
        for entry in entries
    )  # fmt: skip
    return [
        Outgoing(cmd("sandbox", "op", key), encode({"v": 1, "commands": commands}))
        for key, commands in _packed(parts)
    ]


def _single(entry: Entry) -> Outgoing:
    ask = entry.ask
    headers = {}
    if ask.reply_to:
        headers[HEADER_REPLY] = ask.reply_to
    if ask.trace:
        headers[HEADER_TRACE] = ask.trace
    if ask.grant == "sandbox.report":
        told = AuditReport(
            project=ask.project, principal=ask.principal, at=ask.at, report=entry.command
        )
        return Outgoing(cmd("audit", "report", ask.project), encode(told), headers)
    if ask.entity == "job":
        job = JobCommand(
            project=ask.project, principal=ask.principal, verb=ask.verb,  # type: ignore[arg-type]
            request=entry.command, reply_to=ask.reply_to,
        )  # fmt: skip
        return Outgoing(cmd("job", ask.verb, ask.project), encode(job), headers)
    if ask.entity == "node":
        subject = cmd("node", "op", entry.command.node)
        return Outgoing(subject, encode(entry.command), headers)
    command = ImageCommand(
        project=ask.project, principal=ask.principal, reply_to=ask.reply_to, trace=ask.trace,
        projects=list(entry.projects), **{ask.verb: entry.command},
    )  # fmt: skip
    return Outgoing(cmd("image", ask.verb, ask.project), encode(command), headers)


_refusals = msgspec.json.Decoder(list[Refusal])


def refusals_to(refusals: Sequence[Refusal]) -> bytes:
    """The stored form of what a quota refused of a request."""
    return encode(refusals)


def refusals_from(data: bytes | None) -> list[Refusal]:
    """What a quota refused of a request that comes again."""
    return _refusals.decode(data) if data else []
