"""Programs that sandboxes execute, as the kernel tells of them.

Owns: the program of ``guest/bpf/execs.bpf.c``, which sandboxes it is about, reading what it
tells. Does not own: what of it is worth a word (:mod:`services.edge.reports.noted`).

The kernel tells when a program has taken its process over, with the arguments that it will
read: however short it lives nothing is looked up afterwards, and nobody waits. It is known
by its name: a copy under another one is another program.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from services.edge.egress.hooks import Hooks
from services.edge.egress.libbpf import Map

MECHANISM = "BPF tracepoint"
_GROUP = struct.Struct("<Q")
_KNOWN = struct.pack("<I", 1)
_NAME_BYTES, _ARGUMENTS = 16, 1024
_EVENT = struct.Struct(f"<QIIII{_NAME_BYTES}s{_ARGUMENTS}s")


@dataclass(frozen=True, slots=True)
class Exec:
    """``argv`` begins with the program's name, whatever it was told its name is, and may be
    cut; the process as this machine names it. ``lost``: so many were not told before it, and
    this is none."""

    argv: list[str]
    pid: int
    uid: int
    lost: int = 0


Heard = Callable[[Exec], None]


class Execs:
    """See the module. ``program`` is the object file, ``names`` are those of programs."""

    def __init__(self, program: Path, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._hooks = Hooks(program, ("on_exec",), self._take)
        self._sandboxes: Map | None = None
        self._held: dict[str, int] = {}
        self._heard: dict[int, Heard] = {}
        self._lost: dict[int, int] = {}

    def probe(self) -> str:
        """What tells here. Raises ``Unsupported`` or ``Unavailable``."""
        if self._hooks.open():
            known = self._hooks.map("programs")
            for name in self._names:
                known.set(name.encode().ljust(_NAME_BYTES, b"\0"), _KNOWN)
            self._sandboxes = self._hooks.map("sandboxes")
        return MECHANISM

    def begin(self, uid: str, group: Path, heard: Heard) -> None:
        """Tells of all in the control group ``group`` and below it. Raises as :meth:`probe`
        does, and ``OSError``."""
        self.probe()
        assert self._sandboxes is not None
        self.end(uid)
        number = group.stat().st_ino
        self._sandboxes.set(_GROUP.pack(number), _GROUP.pack(0))
        self._held[uid], self._heard[number], self._lost[number] = number, heard, 0
        self._hooks.listen()

    def end(self, uid: str) -> None:
        """The sandbox is over, all that it did is told; one that has none is fine."""
        number = self._held.pop(uid, None)
        if number is None:
            return
        assert self._sandboxes is not None
        self._hooks.consume()
        self._count(number)
        self._sandboxes.delete(_GROUP.pack(number))
        del self._heard[number], self._lost[number]

    def close(self) -> None:
        """The program goes."""
        for uid in list(self._held):
            self.end(uid)
        self._hooks.close()

    def _take(self, raw: bytes) -> None:
        group, pid, user, size, _, name, arguments = _EVENT.unpack(raw[: _EVENT.size])
        heard = self._heard.get(group)
        if heard is None:  # it has just ended
            return
        self._count(group)
        heard(Exec(argv_of(name, arguments[:size]), pid, user))

    def _count(self, group: int) -> None:
        assert self._sandboxes is not None
        raw = self._sandboxes.get(_GROUP.pack(group), _GROUP.size)
        lost = int(_GROUP.unpack(raw)[0]) if raw else 0
        if lost > self._lost[group]:
            self._heard[group](Exec([], 0, 0, lost=lost - self._lost[group]))
            self._lost[group] = lost


def argv_of(name: bytes, arguments: bytes) -> list[str]:
    """The arguments of a program, its name first: those after the script where an
    interpreter runs it. Pure."""
    called = name.split(b"\0")[0].decode(errors="replace")
    words = arguments.decode(errors="replace").removesuffix("\0").split("\0")
    named = (n for n, word in enumerate(words[:3]) if word.rpartition("/")[2] == called)
    return [called, *words[next(named, 0) + 1 :]]
