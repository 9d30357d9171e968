"""What enforces a policy on containers of this node.

Owns: which mechanisms there are, the plan in force for each sandbox, putting it into
force and changing it. Does not own: the compiler (:mod:`services.edge.policy`), mounts
(guest/attach), filters on processes (the agent), the way out
(:mod:`services.edge.egress`).
"""

from __future__ import annotations

import asyncio
import logging
import platform
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from schemas.audit import Violation
from schemas.secret import GivenSecret
from services.edge.agent import files, wire
from services.edge.agent.asking import Asking, Denied, Room
from services.edge.agent.client import AgentClient
from services.edge.agent.wire import Tag
from services.edge.drivers.base import TRUST_PATH, Feature, StartSpec
from services.edge.drivers.container.confining import Confining, probed
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.drivers.container.shells import Rooted
from services.edge.drivers.container.targets import Target
from services.edge.drivers.policing import Vault
from services.edge.egress.manager import Egress
from services.edge.egress.resolver import servers_of
from services.edge.egress.sides import Traffic
from services.edge.machine import profiles
from services.edge.policy import seccomp
from services.edge.policy.plan import Plan, compile_policy
from services.edge.policy.reach import parse_services
from services.edge.policy.services import PUBLIC
from services.edge.policy.watched import watched
from services.edge.reports.noted import FORMS
from services.edge.reports.violations import TURN_S, Repeats
from services.edge.sensors import decoys
from services.edge.sensors.execs import Execs
from services.edge.sensors.marking import Mark
from services.edge.sensors.watching import Sensors
from shared.errors import Conflict, SandboxDied, Unavailable, Unsupported
from shared.policies import Policy

log = logging.getLogger(__name__)

MIB = 1 << 20
LETTERS = {"read_only": "r", "hidden": "h", "protected": "p", "noexec": "x"}
"""How the attaching helper is told of them; upper case where the path may be missing."""
PROC_SYSCALLS = Path("/proc/sys/kernel/seccomp/actions_avail")

GATE_TRIES, GATE_AGAIN_S = 3, 0.5

Tell = Callable[[Violation], None]
Marks = list[Mark]


@dataclass(slots=True)
class _Held:
    uid: str
    project: str
    plan: Plan
    asking: Asking | None = None
    room: Room = field(default_factory=Room)
    sent: bool = False  # whether the agent may have a policy


class Enforcing:
    """See the module."""

    def __init__(self, settings: ContainerSettings) -> None:
        self._machine = platform.machine()
        self._held: dict[str, _Held] = {}
        self.tell: Tell = lambda found: log.info("denied: %s", found)
        self._repeats = Repeats()
        self._turn: asyncio.TimerHandle | None = None
        self.egress = Egress(
            program=settings.egress, uplink=Path(settings.uplink) if settings.uplink else None,
            servers=servers_of(settings.resolvers),
            services={**PUBLIC, **parse_services(settings.services)},
            tell=self._tell, authority=settings.authority,
            roots=Path(settings.roots) if settings.roots else None,
        )  # fmt: skip
        self._folders = settings.sandboxes_dir
        self._decoys: dict[str, socket.socket | None] = {}  # until they are listened to
        self._execs = Execs(settings.execs, FORMS)
        self._sensors = Sensors(self._tell, self._execs)
        self._confining = Confining(settings.files, self._tell)
        self.vault: Vault = _no_vault

    def _tell(self, found: Violation) -> None:
        now = self._repeats.add(found)
        if now is not None:
            self.tell(now)
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_later(TURN_S, self._end_turn)

    def _end_turn(self) -> None:
        self._turn = None
        for found in self._repeats.turn():
            self.tell(found)

    def features(self) -> dict[str, Feature]:
        """What the probe found. Blocking."""
        network = probed(self.egress.probe)
        return {
            "network_allow": network,
            "secrets": Feature(network.supported, network.reason),
            "policy_files": Feature(True, "mounts"),
            "policy_calls": self._calls(),
            "policy_limits": Feature(True, "rlimit"),
            "policy_signals": Feature(True, "PID namespace"),
            "sensors": probed(self._sensors.probe),
            "sensors_execs": probed(self._execs.probe),
            **self._confining.features(),
        }

    def _calls(self) -> Feature:
        if self._machine not in seccomp.NUMBERS:
            return Feature(False, f"no table of system calls of {self._machine}")
        try:
            actions = PROC_SYSCALLS.read_text().split()
        except OSError:
            return Feature(False, "the kernel has no seccomp filters")
        told = "each told" if "user_notif" in actions else "untold"
        return Feature("errno" in actions, f"seccomp, {told}")

    def plan(self, spec: StartSpec, features: Mapping[str, Feature]) -> Plan:
        """What is to be done for a start. Raises ``PolicyDenied`` or ``InvalidRequest``."""
        made = compile_policy(spec.policy, features)
        if made.opens:
            self.egress.check(spec.policy)
        return made

    def guards(self, uid: str, plan: Plan, spare: decoys.Spare) -> list[str]:
        """What the attaching helper lays over paths; ``spare`` is a decoy that is to be its.
        Blocking."""
        decoy = []
        if plan.watches:
            made, self._decoys[uid] = decoys.take(spare, self._folders / uid)
            decoy = [f"d{made}"]
        spare.close()
        return decoy + [
            (LETTERS[m.kind].upper() if m.optional else LETTERS[m.kind]) + m.path
            for m in plan.mounts
        ]

    async def begin(
        self, target: Target, plan: Plan, *, root: Awaitable[Rooted[Marks]] | None = None,
        going: asyncio.Event | None = None, recovers: bool = False,
    ) -> None:  # fmt: skip
        """Puts a plan into force, before anything runs or (``recovers``) anew, after a
        restart of the edge. ``root`` gives the sandbox its root, with what :meth:`mark` found
        there: what needs none is done meanwhile, once that is ``going``. Raises, and then
        nothing of it holds anything of the edge's."""
        held = self._held[target.uid] = _Held(target.uid, target.project, plan)
        try:
            rooted = asyncio.ensure_future(root or _nothing())
            await together(rooted, self._rootless(target, held, going, recovers))
            self._protect(target, plan)
            done = rooted.result()
            await self._watch(target, plan, done.found if done else None, anew=recovers)
            if target.secrets and not recovers:
                await self._trust(target.agent)
        except BaseException:
            self.end(target.uid)
            raise

    async def _rootless(
        self, target: Target, held: _Held, going: asyncio.Event | None, recovers: bool
    ) -> None:
        if going is not None:
            await going.wait()
        self._look(target, held.plan)
        await together(self._process(target, held), self._out(target, held, recovers))

    async def _out(self, target: Target, held: _Held, recovers: bool) -> None:
        if held.plan.opens and recovers:
            await self._open_again(target, held)
        elif held.plan.opens:
            await self._open(target, held.plan.policy)
        else:
            self.egress.unprepare(target.container)

    def _protect(self, target: Target, plan: Plan) -> None:
        group = Path(target.groups.v2 or "")
        self._confining.protect(target.uid, plan, group=group, pid=target.pid)

    async def _trust(self, agent: AgentClient) -> None:
        bundle = await asyncio.to_thread(self.egress.trust)

        async def chunks() -> AsyncIterator[bytes]:
            yield bundle

        await files.write(agent, TRUST_PATH, chunks(), user="root", mode=0o444)

    async def change(self, target: Target, plan: Plan) -> None:
        """Puts another plan into force. Raises ``Unsupported`` for what a running sandbox
        keeps; whatever it raises, the old plan is in force, but for ``SandboxDied``: then
        neither is as a whole, and the sandbox is to end."""
        held = self._held[target.uid]
        _check_change(held.plan, plan)
        if plan.opens:
            self.egress.check(plan.policy)
        old = held.plan
        try:
            await self._replace(target, held, plan)
        except BaseException:
            await asyncio.shield(self._back(target, held, old))
            raise

    async def _replace(self, target: Target, held: _Held, plan: Plan) -> None:
        held.plan = plan
        await self._process(target, held)
        self._protect(target, plan)
        self._look(target, plan)
        await self._watch(target, plan, anew=True)
        if not plan.opens:
            self.egress.shut(target.uid)
        elif self.egress.has(target.uid):
            self.egress.change(target.uid, plan.policy)
        else:
            await self._open(target, plan.policy)

    async def _back(self, target: Target, held: _Held, old: Plan) -> None:
        """The old plan again, however much of another is in force."""
        try:
            await self._replace(target, held, old)
        except Exception as err:
            if target.agent.lost:  # it is over, or found again with the plan that is noted
                return
            text = f"half a policy is in force, and the old one cannot be: {err}"
            raise SandboxDied(text, cause="internal") from err

    def _look(self, target: Target, plan: Plan) -> None:
        if plan.watches:
            self._sensors.prepare(
                target.uid, target.project, folder=self._folders / target.uid,
                group=Path(target.groups.v2) if target.groups.v2 else None,
                stage=plan.policy.stage, decoy=self._decoys.pop(target.uid, None),
            )  # fmt: skip
        else:
            self._sensors.end(target.uid)

    def mark(self, target: Target, plan: Plan, *, anew: bool = False) -> Marks:
        """Marks what is watched of a sandbox that has its root; nothing is told of it before
        it has begun. Blocking. Raises ``InvalidRequest``."""
        if not plan.watches:
            return []
        return self._sensors.mark(target.pid, watched(plan.policy), anew=anew)

    async def _watch(
        self, target: Target, plan: Plan, found: Marks | None = None, *, anew: bool
    ) -> None:
        if found is None and plan.watches:
            found = await asyncio.to_thread(lambda: self.mark(target, plan, anew=anew))
        if found:
            self._sensors.take(target.uid, found)

    async def _open(self, target: Target, policy: Policy) -> None:
        group = Path(target.groups.v2 or "").parent
        await self.egress.open(
            target.uid, target.project, pid=target.pid, container=target.container,
            group=group, policy=policy, secrets=target.secrets,
            values=lambda: self.vault(target.project, target.uid),
        )  # fmt: skip

    async def _open_again(self, target: Target, held: _Held) -> None:
        for left in reversed(range(GATE_TRIES)):
            try:
                return await self._open(target, held.plan.policy)
            except Conflict as err:
                if not left:
                    return self._stays_shut(held, err)
            await asyncio.sleep(GATE_AGAIN_S)  # it may be an edge's that is just ending

    def _stays_shut(self, held: _Held, err: Conflict) -> None:
        """While the edge was away a process took the gate's place: the sandbox lives on
        and reaches nothing, until other rules are put into force."""
        self._tell(
            Violation(
                id="", at=time.time(), node="", uid=held.uid, project=held.project,
                source="policy", verdict="denied", rule="network.gate", mechanism="gate",
                action="bind", subject=err.message, stage=held.plan.policy.stage,
            )
        )  # fmt: skip

    async def _process(self, target: Target, held: _Held) -> None:
        """What the agent applies to commands to come."""
        plan, old = held.plan, held.asking
        payload = b""
        asking: Asking | None = None
        if plan.calls or target.quota:
            payload += wire.field(Tag.FILTER, self._filter(target, plan, notify=False))
        if plan.calls:
            asking = Asking(lambda denied: self._denied(held, denied), held.room)
            payload += wire.field(Tag.FILTER_ASK, self._filter(target, plan, notify=True))
            payload += wire.field(Tag.HAS_ASK, 1)
        if plan.limits.open_files is not None:
            payload += wire.field(Tag.OPEN_FILES, plan.limits.open_files)
        if plan.limits.file_mb is not None:
            payload += wire.field(Tag.FILE_SIZE, plan.limits.file_mb * MIB)
        await self._confining.begin(target.uid, target.project, plan)
        if plan.confines:
            payload += wire.field(Tag.PROFILE, profiles.name_of(target.uid))
        if not payload and not held.sent:
            return
        held.sent = True
        try:
            await target.agent.policy(payload, asking.theirs if asking else None)
        except BaseException:
            if asking is not None:
                asking.close()
            raise
        if asking is not None:
            asking.theirs.close()
        if old is not None:
            old.retire()
        held.asking, held.sent = asking, bool(payload)

    def _filter(self, target: Target, plan: Plan, *, notify: bool) -> bytes:
        return seccomp.program(plan.policy, self._machine, notify=notify, projects=target.quota)

    def _denied(self, held: _Held, denied: Denied) -> None:
        call, rule = seccomp.describe(self._machine, denied.number, denied.args)
        if rule == "processes.fs_ioctl" and "fs_ioctl" not in held.plan.policy.deny:
            rule = "resources.disk_mb"
        self._tell(
            Violation(
                id="", at=time.time(), node="", uid=held.uid, project=held.project,
                source="seccomp", verdict="denied", rule=rule, mechanism="seccomp",
                action="call", syscall=call, subject=call, stage=held.plan.policy.stage,
                actor={"pid": denied.pid, "uid": denied.uid, "comm": denied.comm},
            )
        )  # fmt: skip

    def traffic(self, uid: str) -> Traffic:
        """What a sandbox sent and received by its way out."""
        return self.egress.traffic(uid)

    def limit_of(self, uid: str) -> int | None:
        """The budget of output that a policy sets, in bytes."""
        held = self._held.get(uid)
        return held.plan.limits.output_bytes if held else None

    def end(self, uid: str) -> None:
        """The sandbox is over."""
        held = self._held.pop(uid, None)
        if (decoy := self._decoys.pop(uid, None)) is not None:
            decoy.close()
        self.egress.forget(uid)
        self._sensors.end(uid)
        self._confining.end(uid)
        if held is not None and held.asking is not None:
            held.asking.close()

    def close(self) -> None:
        """The edge ends: no sandbox reaches out until it is back."""
        for uid in list(self._held):
            self.end(uid)
        self.egress.close()
        self._sensors.close()
        self._confining.close()
        if self._turn is not None:
            self._turn.cancel()
            self._end_turn()


async def together(*work: Awaitable[object]) -> None:
    """Until all of it has ended. Raises what the first in this order did that failed."""
    for done in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(done, BaseException):
            raise done


async def _nothing() -> None: ...


async def _no_vault(_project: str, _uid: str) -> Mapping[str, GivenSecret]:
    raise Unavailable("this edge has no secrets")


def _check_change(old: Plan, new: Plan) -> None:
    if old.mounts != new.mounts:
        text = "files of a running sandbox are protected as they were when it started"
        raise Unsupported(text, field="policy.files")
    if old.limits != new.limits:
        raise Unsupported("limits of a running sandbox stay", field="policy.resources")
