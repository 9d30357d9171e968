"""The sensors of a node.

Owns: what is watched in each sandbox, and making a violation of what the kernel tells.
Does not own: which paths (:mod:`services.edge.policy.watched`), publishing (the edge).

Nothing that a process says is believed: whose an opening was is known by the mount it
came through, which path by the kernel. The process is named as far as it is still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from schemas.audit import Violation
from services.edge.policy.watched import DECOY, PROGRAM, Watched
from services.edge.reports.noted import form_of
from services.edge.sensors import decoys, execs, fanotify, inotify
from services.edge.sensors.marking import Mark, Marking, by_the_way
from shared.errors import DsecError

log = logging.getLogger(__name__)

MECHANISM = "fanotify"
READS_PER_TURN, TURN_S = 8, 0.1
"""Reads of some 64 events each: who makes more of them waits in the kernel's queue."""

SAME_S = 2.0
"""A change of content this soon after a write is that write."""

Tell = Callable[[Violation], None]


@dataclass(slots=True)
class _Sandbox:
    uid: str
    project: str
    stage: str
    mounts: list[int] = field(default_factory=list)
    written: float = 0.0
    files: dict[int, Mark] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)
    listener: decoys.Listener | None = None


@dataclass(frozen=True, slots=True)
class _Spot:
    """What it means when something came through a mount; ``what`` None: a file in it."""

    sandbox: _Sandbox
    what: Watched | None


class Sensors:
    """See the module. ``tell`` is given every violation, without id and node. What is
    executed is told by ``programs`` where it can be."""

    def __init__(self, tell: Tell, programs: execs.Execs) -> None:
        self._tell = tell
        self._execs = programs
        self._group: fanotify.Group | None = None
        self._watches: inotify.Watches | None = None
        self._spots: dict[int, _Spot] = {}
        self._files: dict[int, _Sandbox] = {}
        self._held: dict[str, _Sandbox] = {}
        self._turn: asyncio.TimerHandle | None = None

    def probe(self) -> str:
        """What watches here. Raises ``Unsupported``."""
        if self._group is None:
            self._group, self._watches = fanotify.Group(), inotify.Watches()
        return MECHANISM

    def prepare(
        self, uid: str, project: str, *, folder: Path, group: Path | None, stage: str = "",
        decoy: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """What is watched of a sandbox that may have no root yet: its decoy, and what is
        executed in its control group. ``folder`` is its own on this node, ``decoy`` a socket
        that listens there. Again is fine, and ends what was watched."""
        try:
            self.probe()
        except DsecError as err:
            log.debug("nothing is watched: %s", err.message)
            if decoy is not None:
                decoy.close()
            return
        self.end(uid)
        held = self._held[uid] = _Sandbox(uid, project, stage)
        with contextlib.suppress(DsecError, OSError):  # the probe says why not
            if group is not None:
                self._execs.begin(uid, group, lambda one: self._executed(held, one))
        made = folder / decoys.FOLDER
        if made.is_dir():
            held.listener = decoys.Listener(
                made, lambda pid, user: self._called(held, pid, user), decoy
            )

    def mark(self, pid: int, what: Sequence[Watched], *, anew: bool = False) -> list[Mark]:
        """Marks what is watched in the root of a process of a sandbox, before anything runs in
        it or ``anew``; for :meth:`take`. Blocking, for any thread. Raises ``InvalidRequest``."""
        if self._group is None or self._watches is None:
            return []
        return Marking(self._group, self._watches).mark(pid, what, anew=anew)

    def take(self, uid: str, found: Iterable[Mark]) -> None:
        """From here on what comes of marks is told of a sandbox that was prepared. One that
        ended meanwhile is fine."""
        held = self._held.get(uid)
        if held is None or self._group is None:
            return
        for mark in found:
            if mark.watch is not None:
                held.files.setdefault(mark.watch, mark)
                held.rules.setdefault(mark.path, mark.what.rule)
                self._files[mark.watch] = held
            held.mounts.append(mark.mount)
            known = mark.what if mark.what.kind == "mount" else None
            self._spots.setdefault(mark.mount, _Spot(held, known))
        self._listen()

    def end(self, uid: str) -> None:
        """The sandbox is over; its marks go with its mounts."""
        held = self._held.pop(uid, None)
        if held is None:
            return
        self._execs.end(uid)
        self._read()
        for mount in held.mounts:
            self._spots.pop(mount, None)
        for watch in held.files:
            self._files.pop(watch, None)
            assert self._watches is not None
            self._watches.remove(watch)
        if held.listener is not None:
            held.listener.close()

    def close(self) -> None:
        """Nothing is watched any more."""
        for uid in list(self._held):
            self.end(uid)
        self._execs.close()
        if self._turn is not None:
            self._turn.cancel()
        loop = asyncio.get_running_loop()
        for source in (self._group, self._watches):
            if source is not None:
                loop.remove_reader(source.fd)
                source.close()
        self._group = self._watches = None

    # -- what is told -----------------------------------------------------------------

    def _listen(self) -> None:
        assert self._group is not None and self._watches is not None
        loop = asyncio.get_running_loop()
        self._turn = None
        loop.add_reader(self._group.fd, self._opened)
        loop.add_reader(self._watches.fd, self._changed)

    def _opened(self) -> None:
        for _ in range(READS_PER_TURN):
            if not self._read_events():
                return
        assert self._group is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._group.fd)
        self._turn = loop.call_later(TURN_S, self._listen)

    def _read(self) -> None:
        """What was told before something ends."""
        for _ in range(READS_PER_TURN):
            if not self._read_events():
                break
        self._changed()

    def _read_events(self) -> int:
        assert self._group is not None
        events = self._group.read()
        for event in events:
            if event.lost:
                self._lost()
            elif (spot := self._spots.get(event.mount)) is not None:
                self._seen(spot, event)
        return len(events)

    def _seen(self, spot: _Spot, event: fanotify.Event) -> None:
        what = spot.what
        action = "write" if event.mask & fanotify.MODIFY else "open"
        path = event.path if what is None else _below(what.path, event.path)
        rule = what.rule if what else spot.sandbox.rules.get(path, PROGRAM)
        if action == "write":
            spot.sandbox.written = time.monotonic()
        denied = bool(what and what.denied)
        self._say(spot.sandbox, rule, action, path, actor=_process(event.pid), denied=denied)

    def _changed(self) -> None:
        assert self._watches is not None
        for change in self._watches.read():
            held = self._files.get(change.watch)
            if change.mask & inotify.OVERFLOW:
                self._lost()
            if held is None or not change.mask & (inotify.MASK | inotify.IN_FOLDER):
                continue
            self._change(held, held.files[change.watch], change)

    def _change(self, held: _Sandbox, mark: Mark, change: inotify.Change) -> None:
        if change.mask & inotify.CONTENT:
            asyncio.get_running_loop().call_later(TURN_S, self._cut, held, mark)
        elif not change.name:
            self._say(held, mark.what.rule, _action(change.mask), mark.path)
        elif not by_the_way(change.name):
            action = "remove" if change.mask & inotify.GONE else "create"
            self._say(held, mark.what.rule, action, f"{mark.path}/{change.name}")

    def _cut(self, held: _Sandbox, mark: Mark) -> None:
        """Its content changed. Of writes the other group tells, with the process; of a file
        that is cut by its name it does not."""
        if self._held.get(held.uid) is not held:
            return
        self._read_events()
        if time.monotonic() - held.written > SAME_S:
            self._say(held, mark.what.rule, "truncate", mark.path)

    def _called(self, held: _Sandbox, pid: int, user: int) -> None:
        path = f"{DECOY}/{decoys.SOCKET}"
        self._say(
            held, "platform.decoy", "connect", path, actor=_process(pid, user), denied=True,
            mechanism="decoy",
        )  # fmt: skip

    def _executed(self, held: _Sandbox, one: execs.Exec) -> None:
        """Only what is worth a word, in its bare form."""
        if one.lost:
            self._say(held, "sensors.lost", "", "", lost=one.lost, mechanism=execs.MECHANISM)
        elif form := form_of(one.argv):
            actor = {"pid": one.pid, "uid": one.uid, "comm": one.argv[0]}
            self._say(
                held, "command", "exec", "", subject=form, actor=actor, mechanism=execs.MECHANISM
            )

    def _lost(self) -> None:
        """The queue was full: whose events went is not known, so it is said of each."""
        for held in self._held.values():
            self._say(held, "sensors.lost", "", "", lost=1)

    def _say(
        self, held: _Sandbox, rule: str, action: str, path: str, *, subject: str = "",
        actor: Mapping[str, object] | None = None, mechanism: str = MECHANISM,
        denied: bool = False, lost: int = 0,
    ) -> None:  # fmt: skip
        self._tell(
            Violation(
                id="", at=time.time(), node="", uid=held.uid, project=held.project,
                source="observer", verdict="denied" if denied else "observed", rule=rule,
                mechanism=mechanism, action=action, path=path, subject=subject or path,
                actor=dict(actor or {}), lost=lost, stage=held.stage,
            )
        )  # fmt: skip


def _action(mask: int) -> str:
    if mask & inotify.DELETED:
        return "remove"
    return "rename" if mask & inotify.MOVED else "setattr"


def _below(path: str, told: str) -> str:
    """A path as the sandbox has it, from one that may begin at the mount."""
    if told == path or told.startswith(path + "/"):
        return told
    return path if told in ("", "/") else path + told


def _process(pid: int, user: int = -1) -> dict[str, object]:
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        return {
            "pid": pid, "uid": folder.stat().st_uid if user < 0 else user,
            "comm": (folder / "comm").read_text(errors="replace").strip(),
        }
    return {"pid": pid, "uid": user} if user >= 0 else {"pid": pid}
