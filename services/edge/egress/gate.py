"""The gate of one sandbox: takes what the kernel turned to it and connects outside.

Owns: the policy in force for one sandbox, in the kernel and here; its flows; what its
names opened. Does not own: loading programs (:mod:`.kernelmaps`), which sandboxes there
are (:mod:`.manager`). Whatever the kernel let through is judged here again, and what came
by a name must say that name: an address alone may be shared by others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.edge.egress import flows
from services.edge.egress.dns import ACCEPT_AGAIN_S, KINDS, Lookup, NameServer
from services.edge.egress.grants import Grants
from services.edge.egress.injecting import Injector
from services.edge.egress.kernelmaps import Kernel, PolicyMap
from services.edge.egress.names import HEAD_MAX, Head
from services.edge.egress.namespaces import Inside, Uplink
from services.edge.egress.resolver import Answer, Resolver
from services.edge.egress.sides import Traffic
from services.edge.policy.reach import Entry, Reach, Verdict
from shared.errors import CapacityExhausted, DsecError
from shared.policies.network import Address

log = logging.getLogger(__name__)

FLOWS_MAX = 1024
HEAD_S = 10.0
CONNECT_S = 15.0
REAP_S = 5.0
WARN_S = 60.0
CHECKED_PORTS = frozenset({80, 443})
HEAD_PIECE = 16 * 1024
OWN = Verdict(False, "never")


@dataclass(frozen=True, slots=True)
class Refused:
    """Something the gate did not let through. ``source`` is ``dns``, ``sni`` or
    ``bpf_net`` (the kernel should have)."""

    source: str
    rule: str
    address: str = ""
    port: int = 0
    name: str = ""
    pid: int = 0


@dataclass(eq=False, slots=True)
class _Flow:
    task: asyncio.Task[None]
    address: Address
    port: int
    name: str = ""


class Gate:
    """See the module. ``tell`` is given what is refused here."""

    def __init__(
        self, inside: Inside, reach: Reach, *, kernel: Kernel, uplink: Uplink,
        resolver: Resolver, tell: Callable[[Refused], None], traffic: Traffic,
        injector: Injector | None = None,
    ) -> None:  # fmt: skip
        self._inside, self._reach, self._injector = inside, reach, injector
        self._kernel, self._uplink, self._resolver, self._tell = kernel, uplink, resolver, tell
        self._traffic, self._grants = traffic, Grants()
        self._late: set[Address] = set()
        self._warn_at = 0.0
        self._rules: dict[str, int] = {}
        self._flows: set[_Flow] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._dns = NameServer(inside.dns_udp, inside.dns_tcp, self._look)
        self._map = self._filled(reach)

    @property
    def cookie(self) -> int:
        return self._inside.cookie

    def rule(self, number: int) -> str:
        """The text of the rule that the kernel names."""
        return self._map.rule(number)

    def open(self) -> None:
        """Lets through what is allowed."""
        self._kernel.register(self.cookie)
        self._kernel.enforce(self.cookie, self._map)
        self._dns.open()
        for listener in self._inside.tcp:
            self._tasks.append(asyncio.ensure_future(self._accept(listener)))
        self._tasks.append(asyncio.ensure_future(self._reap()))

    def close(self) -> None:
        """Nothing goes out any more; what is open is reset."""
        self._kernel.drop_policy(self.cookie)
        self._dns.close()
        for task in (*self._tasks, *(flow.task for flow in self._flows)):
            task.cancel()
        self._inside.close()
        self._kernel.forget(self.cookie)
        self._map.close()

    def change(self, reach: Reach) -> int:
        """Puts other rules into force: the kernel's at once and as a whole, names that
        are still allowed keep what they opened, flows that are no longer allowed are
        reset. Returns how many were. Raises ``OSError`` where there is no room, and then
        nothing changed."""
        made = self._filled(reach)
        try:
            self._kernel.enforce(self.cookie, made)
        except BaseException:
            made.close()
            raise
        old, self._map, self._reach = self._map, made, reach
        old.close()
        over = [flow for flow in self._flows if not self._still(flow)]
        for flow in over:
            flow.task.cancel()
        return len(over)

    def _still(self, flow: _Flow) -> bool:
        if self._reach.address(flow.address, flow.port).allow:
            return True
        names = [flow.name] if flow.name else self._grants.names(flow.address)
        return any(self._reach.through(n, flow.address, flow.port).allow for n in names)

    def _filled(self, reach: Reach) -> PolicyMap:
        made = self._kernel.policy(self._rules)
        try:
            made.fill(reach)
            for address in self._grants.until:
                if ports := self._ports(address, reach):
                    made.put([reach.opened(address, ports)])
        except BaseException:
            made.close()
            raise
        return made

    def _ports(self, address: Address, reach: Reach) -> list[tuple[int, int]]:
        names = [n for n in self._grants.names(address) if reach.may_open(n, address).allow]
        return list(dict.fromkeys(pair for name in names for pair in reach.ports(name)))

    # -- names ------------------------------------------------------------------------

    async def _look(self, name: str, kind: int) -> Lookup:
        verdict = self._reach.named(name)
        if not verdict.allow:
            self._tell(Refused("dns", verdict.rule, name=name))
            return Lookup(None)
        if kind not in KINDS:
            return Lookup(Answer(0))
        return Lookup(await self._resolve(name, kind))

    async def _resolve(self, name: str, kind: int) -> Answer:
        """The addresses that a name may open, opened. Raises ``CapacityExhausted``."""
        answer = await self._resolver.ask(name, kind)
        good: list[Address] = []
        for address in answer.addresses:
            verdict = self._reach.may_open(name, address)
            if verdict.allow and await self._is_own(address):
                verdict = OWN
            if verdict.allow:
                good.append(address)
            else:
                self._tell(Refused("dns", verdict.rule, str(address), name=name))
        kept = self._grants.add(name, good, answer.ttl_s, now=time.monotonic())
        if len(kept) < len(good):
            self._warn("names opened too many addresses")
        try:
            self._map.put(self._reach.opened(a, self._ports(a, self._reach)) for a in kept)
        except OSError as err:
            self._late.update(kept)
            self._warn(f"no room for addresses of names: {err.strerror}")
            raise CapacityExhausted("no room for addresses of names") from err
        return Answer(answer.rcode, tuple(kept), answer.ttl_s)

    def _warn(self, text: str) -> None:
        """A sandbox can bring it about as often as it likes."""
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_S
            log.warning("sandbox of namespace %d: %s", self.cookie, text)

    async def _is_own(self, address: Address) -> bool:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        return await self._uplink.is_own(str(address), family)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            self._expire(time.monotonic())

    def _expire(self, now: float) -> None:
        """Closes what is over, and what found no room before; the rest comes next turn."""
        late, self._late = self._late, set()
        for address in {*late, *self._grants.expire(now)}:
            try:
                self._settle(address)
            except OSError as err:
                self._late.add(address)
                self._warn(f"an address of names is not settled: {err.strerror}")

    def _settle(self, address: Address) -> None:
        ports = self._ports(address, self._reach)
        entry = self._reach.opened(address, ports)
        if ports:
            self._map.put([entry])
        elif exact := self._exact(address):
            self._map.put([exact])
        else:
            self._map.remove(entry)

    def _exact(self, address: Address) -> Entry | None:
        block = ipaddress.ip_network(address)
        return next((e for e in self._reach.entries if e.block == block), None)

    # -- connections ------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                if listener.fileno() < 0:
                    return
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            sock.setblocking(False)
            mark = sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) & 0xFFFFFFFF
            origin = self._kernel.origin(self.cookie, mark)
            if origin is None or len(self._flows) >= FLOWS_MAX:
                flows.reset(sock)  # it came by itself, or there are too many
                continue
            address, port, pid = origin
            task = asyncio.ensure_future(self._serve(sock, address, port, pid))
            flow = _Flow(task, address, port)
            self._flows.add(flow)
            task.add_done_callback(lambda _, flow=flow: self._flows.discard(flow))  # type: ignore[misc]

    async def _serve(self, sock: socket.socket, address: Address, port: int, pid: int) -> None:
        outer: socket.socket | None = None
        try:
            target, first, name = await self._judged(sock, address, port, pid)
            if target is None:
                return
            outer = await self._connect(target, port, pid)
            if outer is not None and self._injector and self._injector.takes(name, port):
                await flows.relay(
                    sock, outer, self._injector, first, name=name, port=port,
                    traffic=self._traffic,
                )  # fmt: skip
            elif outer is not None:
                await flows.splice(sock, outer, first, self._traffic)
        except (OSError, TimeoutError, DsecError) as err:
            log.debug("a way out to %s port %d: %r", address, port, err)
        except Exception:
            log.exception("a way out to %s port %d", address, port)
        finally:
            for one in (sock, outer):
                if one is not None and one.fileno() >= 0:
                    flows.reset(one)

    async def _judged(
        self, sock: socket.socket, address: Address, port: int, pid: int
    ) -> tuple[Address | None, bytes, str]:
        """Where to connect, what was read to find out, and the name that was asked for;
        no address: refused."""
        verdict = self._reach.address(address, port)
        names = self._grants.names(address)
        changed = self._injector and any(self._injector.takes(n, port) for n in names)
        if verdict.allow and not changed:
            return address, b"", ""
        if not verdict.allow and not any(
            self._reach.through(n, address, port).allow for n in names
        ):
            self._tell(Refused("bpf_net", verdict.rule, str(address), port, pid=pid))
            return None, b"", ""
        if port not in CHECKED_PORTS and not changed:
            return address, b"", ""
        name, first = await self._asked(sock)
        target, rule = await self._address_of(name, address, port) if name else (None, "no name")
        if target is None:
            if verdict.allow:  # whatever it is called
                return address, first, ""
            if rule:
                self._tell(Refused("sni", rule, str(address), port, name, pid))
            return None, b"", ""
        self._named(name, target)
        return target, first, name

    def _named(self, name: str, target: Address) -> None:
        mine = asyncio.current_task()
        for flow in self._flows:
            if flow.task is mine:
                flow.name, flow.address = name, target

    async def _address_of(
        self, name: str, address: Address, port: int
    ) -> tuple[Address | None, str]:
        """The address that was asked for, where the name opened it, else one that the
        name has: not where a client says it is. None where there is none that it may
        reach, and the rule that denies it."""
        if not any(low <= port <= high for low, high in self._reach.ports(name)):
            return None, self._reach.named(name).rule  # nothing is asked for it either
        opened = self._grants.addresses(name)
        if not opened:
            kind = KINDS[0] if address.version == 4 else KINDS[1]
            opened = list((await self._resolve(name, int(kind))).addresses)
        rule = ""
        for one in (address, *reversed(opened)):
            if one not in opened or one.version != address.version:
                continue
            verdict = self._reach.through(name, one, port)
            if verdict.allow:
                return one, verdict.rule
            rule = verdict.rule
        return None, rule

    async def _asked(self, sock: socket.socket) -> tuple[str, bytes]:
        loop = asyncio.get_running_loop()
        head, read = Head(), 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_S):
                while read < HEAD_MAX:
                    more = await loop.sock_recv(sock, HEAD_PIECE)
                    read += len(more)
                    found = head.add(more)
                    if isinstance(found, str):
                        return found, head.whole
                    if found is False or not more:
                        break
        return "", head.whole

    async def _connect(self, address: Address, port: int, pid: int) -> socket.socket | None:
        if await self._is_own(address):
            self._tell(Refused("bpf_net", OWN.rule, str(address), port, pid=pid))
            return None
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = await self._uplink.socket(family, socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
        except BaseException:
            sock.close()
            raise
        return sock
