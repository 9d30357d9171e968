"""One run of a trace: trainers started, watched, killed where their plan says, restarted.

Owns: the trainers' processes and the account of what they told. Does not own: faults of
the system (:mod:`sim.chaos.faults`) or the verdict (:mod:`sim.chaos.verdict`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from devstack.proxy import Proxy
from libdsec import DSecClient
from services.local import ROOT, LocalSystem
from sim.chaos.trace import Batch, Trace, TrainerKill
from sim.chaos.trainer import Plan

LEASE_S = 2.0
"""Short, so that some of the killed trainers' jobs are lost and paused."""
LIVES = 8
"""Lives of one trainer; more is a failure of its own."""
DEAF_AFTER_S, DEAF_MORE_S = 0.15, 0.5
"""A long command's answer is lost from so long after its request until so long after it
should have ended."""
LINE_BYTES = 1 << 20
RUN_S = 3_600.0


@dataclass
class Account:
    """What the trainers of a run told."""

    rollouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    digests: dict[tuple[str, int], str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    done: dict[str, set[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    made_ms: list[float] = field(default_factory=list)
    over_ms: list[float] = field(default_factory=list)
    replayed_ms: list[float] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0

    @property
    def steps(self) -> int:
        """Different steps that were answered."""
        return sum(len(numbers) for numbers in self.done.values())

    def note(self, told: dict[str, Any]) -> None:
        """One line of a trainer."""
        match told.pop("event"):
            case "step":
                self._step(told)
            case "rollout":
                self.rollouts[told["name"]] = told
                self.lost.pop(told["name"], None)
            case "lost":
                self.lost[told["name"]] = told["error"]
            case "made":
                self.made_ms.append(told["ms"] / told["count"])
            case "retry":
                self.retries[f"{told['what']}: {told['error'].partition(':')[0]}"] += 1
            case "masked":
                self.masked[str(told["cause"])] += 1

    def _step(self, told: dict[str, Any]) -> None:
        name, number = told["name"], told["step"]
        done = self.done.setdefault(name, set())
        again = number in done
        done.add(number)
        self.counts["steps"] += 1
        if (digest := told.get("digest")) is not None:
            self.counts["commands"] += 1
            if not same(self.digests.setdefault((name, number), digest), digest):
                self.changed.append(f"{name}/{number}")
        if again:
            self.replayed_ms.append(told["ms"])
        elif "over_ms" in told:
            self.over_ms.append(told["over_ms"])


def same(one: str, other: str) -> bool:
    """Whether two digests of a step's result agree, in all that both have."""
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    return all(a == b for a, b in pairs)


class Run:
    """One run. ``say`` is told of what happens; ``peace`` leaves all faults out."""

    def __init__(
        self, system: LocalSystem, client: DSecClient, trace: Trace, *, key: str, folder: Path,
        at_once: int, peace: bool, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.system, self.client, self.trace = system, client, trace
        self.account = Account()
        self.events: list[dict[str, Any]] = []
        self._key, self._folder, self._peace, self._say = key, folder, peace, say
        self._slots = asyncio.Semaphore(at_once)
        self._moved = asyncio.Event()
        self._began = time.monotonic()

    def happened(self, what: str, **facts: Any) -> None:
        """Notes a fault, with its time in seconds since the run began."""
        at = round(time.monotonic() - self._began, 2)
        self.events.append({"at_s": at, "what": what, **facts})
        self._say(f"{at:7.1f} s  {what} {' '.join(str(v) for v in facts.values())}")

    async def perform(self) -> Account:
        """All batches."""
        self._began = time.monotonic()
        async with asyncio.timeout(RUN_S):
            await asyncio.gather(*(self._batch(batch) for batch in self.trace.batches))
        self.account.wall_s = time.monotonic() - self._began
        return self.account

    def job(self, batch: Batch) -> str:
        """The job of a batch."""
        return f"chaos-{self._folder.name}-{batch.name}"

    async def until(self, reached: Callable[[], bool]) -> None:
        """Returns when something that trainers tell makes this true."""
        while not reached():
            self._moved.clear()
            await self._moved.wait()

    def answered(self, batch: Batch) -> int:
        """Steps of a batch that were answered so far."""
        names = (r.name for g in batch.groups for r in g.rollouts)
        return sum(len(self.account.done.get(name, ())) for name in names)

    async def _batch(self, batch: Batch) -> None:
        kills = [] if self._peace else [
            k for k in self.trace.faults.trainers if k.batch == batch.name
        ]  # fmt: skip
        async with self._slots:
            for life in range(LIVES):
                kill = kills.pop(0) if kills else None
                if await self._live(batch, kill):
                    return
                self.account.counts["trainer_restarts"] += 1
                if kill is None:
                    self.happened("trainer ended by itself", batch=batch.name, life=life)
                await asyncio.sleep(kill.away_s if kill else 1.0)
        for group in batch.groups:
            for rollout in group.rollouts:
                self.account.lost.setdefault(rollout.name, "its trainer never finished")

    async def _live(self, batch: Batch, kill: TrainerKill | None) -> bool:
        """One life of a trainer: whether it finished."""
        proxy = Proxy(int(self.system.url.rpartition(":")[2]))
        env = {**os.environ, "DSEC_API_KEY": self._key}
        log = (self._folder / f"{batch.name}.log").open("ab")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sim.chaos.trainer", env=env, cwd=ROOT, stderr=log,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES,
        )  # fmt: skip
        log.close()
        killer = asyncio.create_task(self._kill(process, batch, kill))
        deaf: set[asyncio.Task[None]] = set()
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(self._plan(batch, proxy.port)))
            process.stdin.close()
            over = await self._listen(process, proxy, deaf)
            return await process.wait() == 0 and over
        finally:
            for task in (killer, *deaf):
                task.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
            proxy.close()

    def _plan(self, batch: Batch, port: int) -> Plan:
        return Plan(
            url=f"nats://127.0.0.1:{port}", project=self.client.project, job=self.job(batch),
            lease_s=LEASE_S, results=str(self._folder / f"{batch.name}.jsonl"), batch=batch,
        )  # fmt: skip

    async def _listen(
        self, process: asyncio.subprocess.Process, proxy: Proxy, deaf: set[asyncio.Task[None]]
    ) -> bool:
        over = False
        assert process.stdout is not None
        async for line in process.stdout:
            if not line.endswith(b"\n"):
                break  # killed while it wrote
            told = json.loads(line)
            if told["event"] == "long" and not self._peace:
                known = told["step"] in self.account.done.get(told["name"], ())
                if not known:
                    deaf.add(asyncio.create_task(self._lose_answer(proxy, told)))
            over = over or told["event"] == "over"
            self.account.note(told)
            self._moved.set()
        return over

    async def _lose_answer(self, proxy: Proxy, told: dict[str, Any]) -> None:
        await asyncio.sleep(DEAF_AFTER_S)
        self.happened("answers lost", name=told["name"], step=told["step"])
        proxy.mode = "deaf"
        try:
            await asyncio.sleep(told["seconds"] + DEAF_MORE_S)
        finally:
            proxy.drop()
            proxy.mode = "open"

    async def _kill(
        self, process: asyncio.subprocess.Process, batch: Batch, kill: TrainerKill | None
    ) -> None:
        if kill is not None:
            await self.until(lambda: self.answered(batch) >= kill.step)
            if process.returncode is None:
                process.kill()
                self.happened("trainer killed", batch=batch.name, step=kill.step)
