"""AppArmor's records, as the kernel writes them. Pure.

Owns: the three forms in which they come (an audit netlink payload, a line of the
kernel's log, a line of auditd) and what belongs to whom. Does not own: where they are
read, or what they mean.

The kernel writes text that a process chose (its name, a path) in double quotes where it
holds neither a quote, a space, a control nor a non-ASCII character, and as bare hexadecimal
digits else. So no such text can begin a field of its own, if the record is read from its
beginning and by exactly that rule. What does not follow it, or says a field twice, is no
record: a line of another origin (anyone who may write to the kernel's log) must not pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_RECORD = 16_384
"""Characters; the kernel's own limit of one record is below it."""
PROFILE_PREFIX = "dsec-"
"""A profile of ours is named after its sandbox."""

_STAMP = r"audit\((?P<at>\d{1,12}\.\d{1,9}):(?P<serial>\d{1,20})\): (?P<body>.*)"
_NETLINK = re.compile(_STAMP + r"\Z", re.DOTALL)
_DMESG = re.compile(r"(?:\[ *\d+\.\d+\] )?(?:audit: )?type=1400 " + _STAMP + r"\Z", re.DOTALL)
_KMSG = re.compile(r"(?P<priority>\d{1,6}),\d+,\d+,[^;\n]*;(?P<text>[^\n]*)(?:\n .*)?\Z", re.DOTALL)
_AUDITD = re.compile(r"(?:node=\S+ )?type=(?:AVC|1400) msg=" + _STAMP + r"\Z", re.DOTALL)
_FIELD = re.compile(r'([a-z_]{1,32})=(?:"([^"\x00-\x1f]*)"|([^\s"]+))(?: +|\Z)')
_HEX = re.compile(r"(?:[0-9A-F]{2})+\Z")
_ENRICHED = "\x1d"
"""auditd appends its own readings of a record behind it."""
_KERNEL_FACILITY = 0
_CHOSEN = frozenset(
    {"name", "comm", "profile", "peer", "srcname", "target", "exe", "label", "namespace",
     "peer_profile", "peer_label", "peer_name"}
)  # fmt: skip
"""Fields whose text a process can choose: bare digits in them are hexadecimal."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record. ``mode`` is ``DENIED``, ``ALLOWED``, ``STATUS`` …; ``at`` seconds since
    the epoch; ``fields`` has everything else as text."""

    mode: str
    at: float
    serial: int
    operation: str = ""
    profile: str = ""
    name: str = ""
    comm: str = ""
    pid: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def sandbox(self) -> str | None:
        """The uid of the sandbox whose profile it was."""
        own = self.profile.partition("//")[0]
        return own.removeprefix(PROFILE_PREFIX) if own.startswith(PROFILE_PREFIX) else None


def netlink(payload: bytes) -> Record | None:
    """The payload of an audit message of type 1400 (AVC)."""
    text = payload.rstrip(b"\0\n").decode("utf-8", "replace")
    return _record(_NETLINK.match(text)) if len(text) <= MAX_RECORD else None


def kmsg(line: str) -> Record | None:
    """A record of ``/dev/kmsg``, or the same as ``dmesg`` prints it. A record of
    ``/dev/kmsg`` that a process wrote there says so, and is none."""
    text = line.rstrip("\0\n")
    if len(text) > MAX_RECORD:
        return None
    if found := _KMSG.match(text):
        if int(found["priority"]) >> 3 != _KERNEL_FACILITY:
            return None
        text = found["text"]
    return _record(_DMESG.match(text))


def auditd(line: str) -> Record | None:
    """A line of auditd's log."""
    text = line.rstrip("\0\n").partition(_ENRICHED)[0]
    return _record(_AUDITD.match(text.rstrip(" "))) if len(text) <= MAX_RECORD else None


def parse(line: str) -> Record | None:
    """A line in any of the forms; ``None`` where it is no record of AppArmor."""
    if line.startswith("audit("):
        return netlink(line.encode("utf-8", "replace"))
    return auditd(line) or kmsg(line)


def _record(found: re.Match[str] | None) -> Record | None:
    if found is None:
        return None
    fields = _fields(found["body"])
    if fields is None or "apparmor" not in fields:
        return None
    take = fields.pop
    pid = take("pid", "0")
    return Record(
        mode=take("apparmor"), at=float(found["at"]), serial=int(found["serial"]),
        operation=take("operation", ""), profile=take("profile", ""), name=take("name", ""),
        comm=take("comm", ""), pid=int(pid) if pid.isdecimal() else 0, fields=fields,
    )  # fmt: skip


def _fields(body: str) -> dict[str, str] | None:
    fields: dict[str, str] = {}
    position = 0
    while position < len(body):
        found = _FIELD.match(body, position)
        if found is None or found[1] in fields:
            return None
        key, quoted, bare = found.groups()
        if quoted is None and key in _CHOSEN and _HEX.match(bare):
            quoted = bytes.fromhex(bare).decode("utf-8", "replace")
        fields[key] = bare if quoted is None else quoted
        position = found.end()
    return fields
