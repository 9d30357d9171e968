"""One form for what every source reports. Pure.

Owns: the event that rules look at, made from a stored violation. Does not own: the
record, or whose a sandbox is.

Sources differ in where they put what they saw: the network programs name a destination,
the file ones a path, AppArmor one line of the kernel's log, graders a subject. An event
has it all at the same place, and nothing in it is ever interpreted again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shared import apparmor

TEXT_MAX = 1_024
"""Characters of a text that rules look at; the record keeps all of it."""
APPARMOR = "apparmor"

_OPERATIONS = {
    "mknod": "create", "mkdir": "create", "unlink": "remove", "rmdir": "remove",
    "rename_src": "rename", "rename_dest": "rename", "truncate": "write", "exec": "exec",
    "file_perm": "open", "file_mmap": "open", "sendmsg": "connect",
}  # fmt: skip
_WRITES = frozenset("wacdk")


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened, to whom. ``attribution``: ``own`` (the sandbox is on the node that
    reports it), ``foreign`` (it is not, or there is none such), ``node`` (it concerns the
    node itself), ``grader`` (a client of its project says so). ``numbers`` are further
    measures, such as ``dropped_bytes``."""

    id: str
    at: float
    source: str
    verdict: str
    rule: str
    mechanism: str = ""
    attribution: str = "own"
    node: str = ""
    uid: str = ""
    project: str = ""
    principal: str = ""
    job: str = ""
    task: str = ""
    action: str = ""
    path: str = ""
    address: str = ""
    port: int = 0
    protocol: str = ""
    domain: str = ""
    syscall: str = ""
    subject: str = ""
    comm: str = ""
    exe: str = ""
    user: str = ""
    pid: int = 0
    count: int = 1
    lost: int = 0
    targets: int = 0
    samples: tuple[str, ...] = ()
    numbers: dict[str, int] = {}

    @property
    def target(self) -> str:
        """The one thing it was about."""
        if self.address or self.domain:
            return (
                f"{self.domain or self.address}:{self.port}"
                if self.port
                else (self.domain or self.address)
            )
        return self.path or self.subject or self.syscall


def event(record_id: str, record: dict[str, Any]) -> Event:
    """The event of a stored violation."""
    get = record.get
    actor = get("actor") or {}
    to = get("destination") or {}
    facts: dict[str, Any] = {
        "id": record_id, "at": float(get("at", 0)), "source": _text(get("source")),
        "verdict": _text(get("verdict")), "rule": _text(get("rule")),
        "mechanism": _text(get("mechanism")), "attribution": _text(get("attribution", "own")),
        "node": _text(get("node")), "uid": _text(get("uid")), "project": _text(get("project")),
        "principal": _text(get("principal")), "job": _text(get("job")),
        "task": _text(get("task")), "action": _text(get("action")), "path": _text(get("path")),
        "address": _text(to.get("address")), "port": _number(to.get("port")),
        "protocol": _text(to.get("protocol")), "domain": _text(to.get("domain")).lower(),
        "syscall": _text(get("syscall")), "subject": _text(get("subject")),
        "comm": _text(actor.get("comm")), "exe": _text(actor.get("exe")),
        "user": _text(actor.get("user")) or str(_number(actor.get("uid")) or ""),
        "pid": _number(actor.get("pid")),
        "count": max(1, _number(get("count", 1))), "lost": _number(get("lost")),
        "targets": _number(get("targets")), "samples": tuple(map(_text, get("samples") or ())),
        "numbers": {str(k): v for k, v in actor.items() if type(v) is int and k != "pid"},
    }  # fmt: skip
    if facts["source"] == APPARMOR:
        facts.update(_apparmor(get("subject") or ""))
    return Event(**facts)


def _apparmor(line: str) -> dict[str, Any]:
    """What a line of the kernel's says, where the reporter passed one on."""
    record = apparmor.parse(line) if "apparmor=" in line else None
    if record is None:
        return {}
    fields = record.fields
    action = _OPERATIONS.get(record.operation, record.operation)
    if action == "open" and _WRITES & set(fields.get("denied_mask", "")):
        action = "write"
    found: dict[str, Any] = {
        "action": action, "comm": _text(record.comm), "pid": record.pid, "subject": "",
        "verdict": "denied" if record.mode == "DENIED" else "observed",
    }  # fmt: skip
    if fields.get("class") == "net" or "family" in fields:
        found["address"] = _text(fields.get("faddr"))
        found["port"] = _number(fields.get("fport"))
        found["subject"] = _text(fields.get("addr"))
    else:
        found["path"] = _text(record.name)
    if "capname" in fields:
        found["subject"] = _text(fields["capname"])
    return found


def _text(value: Any) -> str:
    return value[:TEXT_MAX] if isinstance(value, str) else ""


def _number(value: Any) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        return int(value)
    return value if type(value) is int else 0
