"""The ways out of all sandboxes of a node.

Owns: the kernel's programs, a gate a sandbox, telling what was denied, exactly counted
and bounded in number. Does not own: publishing it (the edge), when a sandbox gets a way
out (its driver).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from schemas.audit import Destination, Violation
from services.edge.drivers.base import Secret
from services.edge.egress.certificates import Authority
from services.edge.egress.gate import Gate, Refused
from services.edge.egress.hooks import Listening
from services.edge.egress.injecting import Injector, Values
from services.edge.egress.kernelmaps import Denial, Event, Kernel, denial, target
from services.edge.egress.namespaces import Inside, Uplink, open_inside
from services.edge.egress.resolver import Resolver
from services.edge.egress.sides import Traffic
from services.edge.policy.reach import Reach
from shared.errors import CapacityExhausted, DsecError, Unavailable
from shared.policies import Policy

log = logging.getLogger(__name__)

COUNT_S = 1.0
REACHES = 64
"""Compiled rules that are kept: of one rollout's sandboxes they are the same."""
TOLD_SINGLY_MAX = 16
"""Destinations of one sandbox in one turn that are told each; more make one summary."""
SAMPLES_MAX = 16
MECHANISM = "cgroup-BPF, gate"

Tell = Callable[[Violation], None]


@dataclass(slots=True)
class _Held:
    uid: str
    project: str
    gate: Gate
    stage: str
    told: dict[bytes, int] = field(default_factory=dict)
    """How much of the kernel's counts, of those that it still has."""
    counted: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    """Counts of one sandbox beside what was told: what is ``more``, and what was told of
    destinations that the kernel forgot."""

    more: dict[bytes, int]
    gone: dict[bytes, int]


class Egress:
    """See the module. ``tell`` is given every violation, without id and node."""

    def __init__(
        self, *, program: Path, uplink: Path | None, servers: Sequence[tuple[str, int]],
        services: Mapping[str, Sequence[str]], tell: Tell, authority: Path,
        roots: Path | None = None,
    ) -> None:  # fmt: skip
        self._program, self._tell = program, tell
        self._reach = lru_cache(REACHES)(lambda rules: Reach(rules, services))
        self._own, self._roots = authority, roots
        self._trusted: Authority | None = None
        self._uplink = Uplink(uplink)
        self._resolver = Resolver(self._uplink, servers)
        self._kernel: Kernel | None = None
        self._held: dict[str, _Held] = {}
        self._prepared: dict[str, Inside] = {}
        self._traffic: dict[str, Traffic] = {}
        self._by_cookie: dict[int, _Held] = {}
        self._counting: asyncio.Task[None] | None = None
        self._listening: Listening | None = None

    def probe(self) -> str:
        """What enforces network rules here. Raises ``Unsupported``."""
        if not self._program.exists():
            raise Unavailable("egress programs are not built (make -C guest bpf, needs clang)")
        if self._kernel is None:
            self._kernel = Kernel(self._program)
        return MECHANISM

    def check(self, policy: Policy) -> None:
        """Raises ``InvalidRequest`` where rules cannot be put into maps."""
        self._reach(policy.network)

    def trust(self) -> bytes:
        """What sandboxes are to trust whose requests are changed. Blocking."""
        return self._authority().bundle()

    def _authority(self) -> Authority:
        if self._trusted is None:
            self._trusted = Authority(self._own, roots=self._roots)
        return self._trusted

    def prepare(self, pid: int, container: str, group: Path) -> None:
        """Makes the gate's sockets in a container that is no sandbox yet and is in ``group``,
        which the kernel's programs watch from then on, ahead of :meth:`open`, which does
        what this did not. Blocking, for any thread."""
        if self._kernel is not None:
            with contextlib.suppress(DsecError, OSError):
                self._kernel.watch(group)
                self._prepared[container] = open_inside(pid, container)

    def unprepare(self, container: str) -> None:
        """They are not needed; a container that has none is fine."""
        if (inside := self._prepared.pop(container, None)) is not None:
            inside.close()

    async def open(
        self, uid: str, project: str, *, pid: int, container: str, group: Path, policy: Policy,
        secrets: Sequence[Secret] = (), values: Values | None = None,
    ) -> None:  # fmt: skip
        """Gives a sandbox, known by a process of its container and the group above it, a
        way out.
        Raises ``Conflict`` where it has taken the gate's addresses itself."""
        reach = self._reach(policy.network)
        self.probe()
        assert self._kernel is not None
        kernel = self._kernel
        injector: Injector | None = None
        if secrets and values is not None:
            injector = Injector(secrets, values, await asyncio.to_thread(self._authority))
        inside = self._prepared.pop(container, None)
        if inside is None:  # else the group is watched, and stays while the container is in it
            kernel.watch(group)
            inside = await asyncio.to_thread(open_inside, pid, container)
        gate: Gate | None = None
        try:
            gate = Gate(
                inside, reach, kernel=kernel, uplink=self._uplink, resolver=self._resolver,
                tell=lambda refused: self._refused(uid, refused), injector=injector,
                traffic=self._traffic.setdefault(uid, Traffic()),
            )  # fmt: skip
        except OSError as err:
            inside.close()
            raise _no_room(err) from err
        except BaseException:
            inside.close()
            raise
        held = _Held(uid, project, gate, policy.stage)
        self._held[uid] = self._by_cookie[gate.cookie] = held
        gate.open()
        self._watch(kernel)

    def change(self, uid: str, policy: Policy) -> int:
        """Puts other rules into force; how many flows were reset. Raises, and then
        nothing changed."""
        held = self._held[uid]
        reach = self._reach(policy.network)
        self._count(held)
        try:
            reset = held.gate.change(reach)
        except OSError as err:
            raise _no_room(err) from err
        held.stage = policy.stage
        return reset

    def has(self, uid: str) -> bool:
        """Whether a sandbox has a way out."""
        return uid in self._held

    def traffic(self, uid: str) -> Traffic:
        """What a sandbox sent and received, since this process began."""
        return self._traffic.get(uid) or Traffic()

    def forget(self, uid: str) -> None:
        """It is over."""
        self.shut(uid)
        self._traffic.pop(uid, None)

    def shut(self, uid: str) -> None:
        """Takes a sandbox's way out. One that has none is fine."""
        held = self._held.pop(uid, None)
        if held is None:
            return
        self._count(held)
        self._by_cookie.pop(held.gate.cookie, None)
        held.gate.close()

    def close(self) -> None:
        """All of them; the kernel's programs go."""
        for uid in list(self._held):
            self.shut(uid)
        for container in list(self._prepared):
            self.unprepare(container)
        if self._counting is not None:
            self._counting.cancel()
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    # -- what is denied -----------------------------------------------------------------

    def _watch(self, kernel: Kernel) -> None:
        if self._counting is None:
            self._listening = Listening(kernel.events(self._event))
            self._counting = asyncio.ensure_future(self._count_on())

    def _event(self, event: Event) -> None:
        held = self._by_cookie.get(event.netns)
        if held is None:
            return
        assert self._kernel is not None
        if self._kernel.count(event.key) <= held.told.get(event.key, 0):
            return  # counted and told already
        held.told[event.key] = held.told.get(event.key, 0) + 1
        held.counted += 1
        actor = {"pid": event.pid, "uid": event.uid, "comm": event.comm}
        self._tell(self._violation(held, denial(event.key), 1, actor=actor))

    def _violation(
        self, held: _Held, what: Denial, count: int, *, actor: dict[str, object] | None = None
    ) -> Violation:
        return Violation(
            id="", at=time.time(), node="", uid=held.uid, project=held.project,
            source="bpf_net", verdict="denied", rule=f"network.{held.gate.rule(what.rule)}",
            mechanism="cgroup-BPF", action=what.action, actor=actor or {}, count=count,
            subject=_text(what), stage=held.stage,
            destination=Destination(
                address=what.address, port=what.port, protocol=what.protocol
            ),
        )  # fmt: skip

    def _refused(self, uid: str, refused: Refused) -> None:
        held = self._held.get(uid)
        if held is None:
            return
        subject = refused.name or f"{refused.address} port {refused.port}"
        self._tell(
            Violation(
                id="", at=time.time(), node="", uid=uid, project=held.project,
                source=refused.source, verdict="denied", rule=f"network.{refused.rule}",
                mechanism="DNS gate" if refused.source == "dns" else "gate",
                action="resolve" if refused.source == "dns" else "connect",
                actor={"pid": refused.pid} if refused.pid else {}, subject=subject,
                stage=held.stage,
                destination=Destination(
                    address=refused.address, port=refused.port, domain=refused.name,
                    protocol="tcp" if refused.port else "",
                ),
            )
        )  # fmt: skip

    async def _count_on(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            totals = self._behind(self._held.values())
            known = {cookie: dict(self._by_cookie[cookie].told) for cookie in totals}
            try:
                # the table is the node's: as long as one sandbox can make it
                read = await asyncio.to_thread(_read, self._kernel, known) if known else {}
                self._take(totals, read)
            except (OSError, DsecError):
                log.exception("denials are counted later")

    def _count(self, held: _Held) -> None:
        """Tells what events did not, before something else is in force."""
        totals = self._behind([held])
        if totals:
            try:
                self._take(totals, _read(self._kernel, {held.gate.cookie: dict(held.told)}))
            except OSError:
                log.exception("denials of %s are not counted", held.uid)

    def _behind(self, sandboxes: Iterable[_Held]) -> dict[int, int]:
        """How much was denied, for sandboxes of which not all is told: the kernel's counts
        are exact, events a sample. What is denied from here on is in the next turn's."""
        assert self._kernel is not None
        totals = {held.gate.cookie: self._kernel.denied(held.gate.cookie) for held in sandboxes}
        return {
            cookie: total for cookie, total in totals.items()
            if (held := self._by_cookie.get(cookie)) and total > held.counted
        }  # fmt: skip

    def _take(self, totals: Mapping[int, int], read: Mapping[int, _Read]) -> None:
        for cookie, found in read.items():
            held = self._by_cookie.get(cookie)
            if held is None:
                continue  # it was counted when it ended
            for key, told in found.gone.items():
                if held.told.get(key) == told:
                    del held.told[key]
            more: list[tuple[bytes, int]] = []
            for key, count in found.more.items():
                new = count - held.told.get(key, 0)  # an event may have come meanwhile
                if new > 0:
                    more.append((key, new))
                    held.told[key] = count
            self._summarise(held, more, totals[cookie])

    def _summarise(self, held: _Held, more: list[tuple[bytes, int]], total: int) -> None:
        counted = sum(count for _, count in more)
        held.counted += counted
        if len(more) <= TOLD_SINGLY_MAX:
            for key, count in more:
                self._tell(self._violation(held, denial(key), count))
        else:
            last = self._violation(held, denial(more[-1][0]), counted)
            samples = [_text(denial(key)) for key, _ in more[:SAMPLES_MAX]]
            self._tell(_summary(last, len({target(key) for key, _ in more}), samples))
        lost = total - held.counted
        if lost > 0:  # their destinations were pushed out by newer ones
            held.counted += lost
            told = self._violation(held, Denial(held.gate.cookie, "", 0, "", "", 0), 0)
            self._tell(_lost(told, lost))


def _read(kernel: Kernel | None, told: Mapping[int, Mapping[bytes, int]]) -> dict[int, _Read]:
    """Blocking."""
    assert kernel is not None
    found = kernel.denials(told)
    return {
        netns: _Read(
            {key: count for key, count in found[netns].items() if count > known.get(key, 0)},
            {key: count for key, count in known.items() if key not in found[netns]},
        )
        for netns, known in told.items()
    }


def _no_room(err: OSError) -> CapacityExhausted:
    return CapacityExhausted(f"no room for network rules: {err.strerror}", field="network_rules")


def _summary(last: Violation, targets: int, samples: list[str]) -> Violation:
    return replace(last, targets=targets, samples=samples)


def _lost(told: Violation, lost: int) -> Violation:
    return replace(told, destination=None, subject="", lost=lost)


def _text(what: Denial) -> str:
    host = f"[{what.address}]" if ":" in what.address else what.address
    return f"{what.protocol}:{host}:{what.port}"
