"""policy: what rules cost where they are enforced, and a create with all of them.

The audit service's figures are those of :mod:`bench.audit_figures`, taken in the same run.
"""

from __future__ import annotations

import asyncio
from typing import Any

from bench import audit_figures, egress_figures
from bench.harness import local_system, percentile, timed
from bench.images import BASE
from libdsec import DSecContainerRunArgs

ROUNDS, QUICK_ROUNDS = 60, 15
WARM_ROUNDS = 3
POLICY = {"preset": "research", "files": {"read_only": ["/usr?", "/bin?", "/etc?"]}}


async def run(*, quick: bool) -> dict[str, Any]:
    """Figures: connect_us_off connect_us_1 connect_us_10k swap_ms dns_ms create_slowdown,
    and those of audit."""
    figures = await asyncio.to_thread(egress_figures.connects, quick=quick)
    figures |= await egress_figures.names(quick=quick)
    figures |= await creates(quick=quick)
    return {**figures, **await audit_figures.run(quick=quick)}


async def creates(*, quick: bool) -> dict[str, Any]:
    """From the SDK's call to the first exec, without a policy and with one, in turns."""
    plain = DSecContainerRunArgs(container_image=BASE, memory_limit_mb=512)
    full = DSecContainerRunArgs(
        container_image=BASE, memory_limit_mb=512, network_rules={"pypi": True}, policy=POLICY
    )
    samples: dict[bool, list[float]] = {False: [], True: []}
    async with local_system() as (_, client):
        made: list[Any] = []

        async def create(args: DSecContainerRunArgs) -> None:
            sandbox = await client.run_container(args)
            made.append(sandbox)
            result = await sandbox.exec("true")
            if result.exit_code != 0:
                raise RuntimeError(f"exec true: {result}")

        for number in range(WARM_ROUNDS + (QUICK_ROUNDS if quick else ROUNDS)):
            for with_policy, args in ((False, plain), (True, full)):
                took = await timed(lambda args=args: create(args))  # type: ignore[misc]
                await made.pop().stop()
                if number >= WARM_ROUNDS:
                    samples[with_policy].append(took)
    off, on = percentile(samples[False], 0.5), percentile(samples[True], 0.5)
    return {
        "create_plain_p50_ms": round(off * 1e3, 2), "create_policy_p50_ms": round(on * 1e3, 2),
        "create_slowdown": round(on / off - 1, 3),
    }  # fmt: skip
