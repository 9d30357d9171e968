"""audit: how fast violations go into the record, and how soon a finding is on the bus.

audit runs as a process of its own on one core, with real NATS and PostgreSQL beside it;
a scheduler that knows every sandbox answers its questions. Ingestion is measured over
what waits in the stream, as after an outage; findings one by one on an idle service.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from nats.aio.msg import Msg

from bench.harness import spread
from devstack import Endpoints, Infra
from schemas.audit import Destination, Violation, Violations
from schemas.base import decode, encode
from schemas.sandbox import SandboxInfo, SandboxPage, SandboxQuery
from schemas.subjects import rpc, sec
from shared import ids
from shared.bus import Bus, Outgoing
from shared.migrate import prepare
from shared.settings import Common
from shared.topology import declare

EVENTS, QUICK_EVENTS = 200_000, 60_000
PER_MESSAGE = 250
SANDBOXES = 200
FLOOD, FLOOD_COUNT = 2_000, 100
ROUNDS, QUICK_ROUNDS = 200, 60
SETTLE_S = 120.0
LOOK_S = 0.02
NODE = "n1"


@dataclass
class Audit:
    """The running parts; ``pid`` is audit's."""

    bus: Bus
    admin: asyncpg.Connection
    pid: int
    backends: list[int]

    def cpu_s(self) -> tuple[float, float]:
        """CPU time that audit, and its backends in PostgreSQL, have used."""
        return _cpu_s(self.pid), sum(_cpu_s(pid) for pid in self.backends)

    async def recorded(self) -> int:
        """Entries of the record."""
        return int(await self.admin.fetchval("select seq from audit.head"))


async def run(*, quick: bool) -> dict[str, Any]:
    """Figures: finding_p50_ms ingest_per_s flood_counted, and what they cost."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as folder:
        async with Infra(Path(folder)) as endpoints, _bus(endpoints) as bus:
            events = QUICK_EVENTS if quick else EVENTS
            await _publish(bus, events)
            async with _audit(endpoints, bus) as audit:
                figures = await _ingest(audit, events)
                figures |= await _findings(audit, QUICK_ROUNDS if quick else ROUNDS)
                figures |= await _flood(audit)
    return figures


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # a connection that was closed
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def _bus(endpoints: Endpoints) -> AsyncIterator[Bus]:
    settings = Common(
        nats_url=endpoints.nats_url, nats_user="scheduler",
        nats_password=endpoints.nats_users["scheduler"],
    )  # fmt: skip
    bus = Bus(settings, "bench")
    await bus.start()
    await declare(bus.js)

    async def answer(message: Msg) -> None:
        found = [
            SandboxInfo(
                uid=uid, project="root", state="running", generation=1, backend="container",
                created_at=1.0, changed_at=1.0, node=NODE, principal="p", job="j",
            )
            for uid in decode(message.data, SandboxQuery).uids
        ]  # fmt: skip
        await message.respond(encode(SandboxPage(sandboxes=found)))

    await bus.client.subscribe(rpc("scheduler", "sandboxes"), cb=answer)
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def _audit(endpoints: Endpoints, bus: Bus) -> AsyncIterator[Audit]:
    dsns = await prepare(endpoints.pg_dsn_admin, {"audit": "of-a-bench"})
    admin = await asyncpg.connect(endpoints.pg_dsn_admin)
    environment = os.environ | {
        "DSEC_NATS_URL": endpoints.nats_url, "DSEC_NATS_USER": "audit",
        "DSEC_NATS_PASSWORD": endpoints.nats_users["audit"], "DSEC_PG_DSN": dsns["audit"],
        "DSEC_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.audit", env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}),
    )  # fmt: skip
    try:
        yield Audit(bus, admin, process.pid, [])
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()
        await admin.close()


def _denial(uid: str, number: int, *, count: int = 1) -> Violation:
    return Violation(
        id=ids.new(), at=time.time(), node=NODE, uid=uid, project="root", source="bpf_net",
        verdict="denied", rule="network.deny", mechanism="cgroup-bpf", action="connect",
        actor={"pid": 4_000 + number % 1_000, "comm": "python3", "user": 1000}, count=count,
        destination=Destination(address="198.51.100.7", port=443, protocol="tcp"),
        policy="p-7", stage="solve",
    )  # fmt: skip


async def _publish(bus: Bus, events: int) -> None:
    uids = [ids.new() for _ in range(SANDBOXES)]
    told = [_denial(uids[number % SANDBOXES], number) for number in range(events)]
    await _tell(bus, told)


async def _tell(bus: Bus, told: list[Violation]) -> None:
    subject = sec("bpf_net", "denied", NODE)
    parts = (told[i : i + PER_MESSAGE] for i in range(0, len(told), PER_MESSAGE))
    await bus.store(
        [Outgoing(subject, encode(Violations(node=NODE, violations=part))) for part in parts]
    )


async def _until(audit: Audit, count: int) -> None:
    end = time.monotonic() + SETTLE_S
    while await audit.recorded() < count:
        if time.monotonic() > end:
            raise TimeoutError(f"{await audit.recorded()} of {count} recorded")
        await asyncio.sleep(LOOK_S)


async def _ingest(audit: Audit, events: int) -> dict[str, Any]:
    await _until(audit, 1)
    rows = await audit.admin.fetch(
        "select pid from pg_stat_activity where application_name = 'dsec-audit'"
    )
    audit.backends = [row["pid"] for row in rows]
    first, began, before = await audit.recorded(), time.perf_counter(), audit.cpu_s()
    await _until(audit, events)
    took = time.perf_counter() - began
    counted = events - first
    used = [(b - a) / counted * 1e6 for a, b in zip(before, audit.cpu_s(), strict=True)]
    return {
        "ingest_per_s": round(counted / took),
        "ingest_events": counted,
        "ingest_cpu_us": round(used[0], 1),
        "ingest_postgres_cpu_us": round(used[1], 1),
    }


async def _findings(audit: Audit, rounds: int) -> dict[str, Any]:
    told: asyncio.Queue[Msg] = asyncio.Queue()

    async def hear(message: Msg) -> None:
        told.put_nowait(message)

    heard = await audit.bus.client.subscribe("dsec.audit.v1.root.critical.*", cb=hear)
    samples = []
    for number in range(rounds):
        attack = Violation(
            id=ids.new(), at=time.time(), node=NODE, uid=ids.new(), project="root",
            source="seccomp", verdict="denied", rule="processes.ioctl", mechanism="seccomp",
            syscall="ioctl", subject="0xc0c0586d", actor={"pid": number, "comm": "xfs_io"},
        )  # fmt: skip
        began = time.perf_counter()
        await _tell(audit.bus, [attack])
        async with asyncio.timeout(SETTLE_S):
            await told.get()
        samples.append(time.perf_counter() - began)
    await heard.unsubscribe()
    return spread(samples, "finding_")


async def _flood(audit: Audit) -> dict[str, Any]:
    """200,000 denials as an edge tells them: summed, with what it could not sum."""
    uid = ids.new()
    before = await audit.recorded()
    await _tell(audit.bus, [_denial(uid, number, count=FLOOD_COUNT) for number in range(FLOOD)])
    await _until(audit, before + FLOOD)
    counted = await audit.admin.fetchval(
        "select sum((record->>'count')::bigint) from audit.record "
        "where target = $1 and kind = 'violation'", uid,
    )  # fmt: skip
    told = await audit.admin.fetchval(
        "select count(*) from audit.record where target = $1 and kind = 'finding'", uid
    )
    return {"flood_counted": int(counted), "flood_sent": FLOOD * FLOOD_COUNT, "flood_told": told}
