"""A chaos run on a system: the same trace in peace and under faults, and its report.

Owns: projects of their own for both runs, their order, the report. Does not own: the
system, which the caller brings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libdsec import DSecClient
from services.local import LocalSystem
from sim.chaos import ledger, verdict
from sim.chaos.faults import inject
from sim.chaos.run import Account, Run
from sim.chaos.tasks import exercises, register
from sim.chaos.trace import Trace

GRANTS = ["sandbox.*", "job.*"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """``images``: a folder the system imports from; ``folder``: where trainers keep what
    they keep; ``at_once``: trainers side by side."""

    system: LocalSystem
    images: Path
    folder: Path
    at_once: int = 2
    say: Callable[[str], None] = print

    async def play(self, trace: Trace) -> dict[str, Any]:
        """Both runs; the report, with ``passed``."""
        async with self._client(self.system.project) as admin:
            found = exercises(g.task for b in trace.batches for g in b.groups)
            await register(admin, found.values(), self.images)
            before = ledger.machine(self.system)
            peace, _, left_in_peace = await self._run(admin, trace, before, peace=True)
            faulted, run, left = await self._run(admin, trace, before, peace=False)
        happened = [" ".join([e["what"], str(e.get("target", ""))]).strip() for e in run.events]
        judged = verdict.checks(
            trace, peace, faulted, happened=happened, left=[*left_in_peace, *left]
        )
        report: dict[str, Any] = {
            "seed": trace.seed, "scale": trace.scale,
            "passed": all(check.ok for check in judged),
            "checks": {check.name: list(check.against) for check in judged},
            "peace": verdict.figures(trace, peace), "faults": verdict.figures(trace, faulted),
            "events": run.events,
        }  # fmt: skip
        return report | {"summary": verdict.summary(judged, report)}

    def _client(self, project: str) -> DSecClient:
        return DSecClient(url=self.system.url, api_key=self.system.admin_key, project=project)

    async def _run(
        self, admin: DSecClient, trace: Trace, before: list[str], *, peace: bool
    ) -> tuple[Account, Run, list[str]]:
        name = f"{'peace' if peace else 'faults'}-{trace.seed}"
        project = await admin.projects.create(name, parent=self.system.project)
        key = await admin.keys.create(project=project.id, name="trainer", grants=GRANTS)
        assert key.secret is not None
        folder = self.folder / name
        folder.mkdir(parents=True)
        async with self._client(project.id) as client:
            run = Run(
                self.system, client, trace, key=key.secret, folder=folder,
                at_once=self.at_once, peace=peace, say=self.say,
            )  # fmt: skip
            self.say(f"{name}: {len(trace.rollouts)} rollouts, {trace.steps} steps")
            faults = None if peace else asyncio.create_task(inject(run))
            try:
                account = await run.perform()
            finally:
                if faults is not None:
                    await _ended(faults)
            return account, run, await ledger.leaks(self.system, client, before)


async def _ended(faults: asyncio.Task[None]) -> None:
    """Ends what is left of the faults; raises what went wrong in making them."""
    if not faults.done():
        faults.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await faults
