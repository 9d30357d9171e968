"""policy: what rules cost where they are enforced, creates and commands with all of them, and
how soon a change is in force.

The audit service's figures are those of :mod:`bench.audit_figures`, taken in the same run.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench import audit_figures, egress_figures
from bench.harness import local_system, percentile, timed
from bench.images import BASE
from bench.outside import HOST, PORT, outside
from libdsec import DSecClient, DSecContainerRunArgs

ROUNDS, QUICK_ROUNDS = 80, 15
REFILL_S = 0.8
"""Until the shell that the last one took has been made again (that begins a quarter of a second
after it was taken, and takes the engine as long) and the engine has removed the old one."""
EXECS, QUICK_EXECS = 400, 100
CHANGES = 50
WARM_ROUNDS = 3
RESET_S = 30.0
POLICY = {"preset": "research", "files": {"read_only": ["/usr?", "/bin?", "/etc?"]}}
OPEN = {f"{HOST}:{PORT}": True}
FLOW = f"""
import socket, time
while True:
    try:
        flow = socket.create_connection(("{HOST}", {PORT}), 10)
        flow.settimeout(None)
        print("open", flush=True)
        flow.recv(1)
    except OSError:
        print("reset", time.monotonic(), flush=True)
        input()
"""
"""Tells when its connection broke, by a clock that the whole machine shares."""


async def run(*, quick: bool) -> dict[str, Any]:
    """Figures: those of :mod:`bench.egress_figures` (connect_us_off connect_us_1
    connect_us_10k swap_ms dns_ms …), create_policy_ratio create_slowdown create_added_p50_ms
    exec_policy_ratio exec_slowdown change_p50_ms change_max_ms, and those of audit."""
    figures = await asyncio.to_thread(egress_figures.connects, quick=quick)
    figures |= await egress_figures.names(quick=quick)
    with outside() as uplink:
        async with local_system(env={"DSEC_CONTAINER_UPLINK": str(uplink)}) as (_, client):
            figures |= await creates(client, quick=quick)
            figures |= await execs(client, quick=quick)
            figures |= await changes(client)
    return {**figures, **await audit_figures.run(quick=quick)}


def _args(*, policy: bool) -> DSecContainerRunArgs:
    if not policy:
        return DSecContainerRunArgs(container_image=BASE, memory_limit_mb=512)
    return DSecContainerRunArgs(
        container_image=BASE, memory_limit_mb=512, network_rules={"pypi": True}, policy=POLICY
    )


async def creates(client: DSecClient, *, quick: bool) -> dict[str, Any]:
    """From the SDK's call to the first exec, without a policy and with one, in turns, each
    once the engine is at rest. ``create_added_p50_ms`` is the median of what a round's policy
    added to its neighbour without: of all it says most where the machine drifts."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    made: list[Any] = []

    async def create(policy: bool) -> None:
        sandbox = await client.run_container(_args(policy=policy))
        made.append(sandbox)
        result = await sandbox.exec("true")
        if result.exit_code != 0:
            raise RuntimeError(f"exec true: {result}")

    for number in range(WARM_ROUNDS + (QUICK_ROUNDS if quick else ROUNDS)):
        for policy in (False, True) if number % 2 else (True, False):
            await asyncio.sleep(REFILL_S)
            took = await timed(lambda policy=policy: create(policy))  # type: ignore[misc]
            await made.pop().stop()
            if number >= WARM_ROUNDS:
                samples[policy].append(took)
    added = [on - off for off, on in zip(samples[False], samples[True], strict=True)]
    added_ms = round(percentile(added, 0.5) * 1e3, 2)
    return {**_beside("create", samples), "create_added_p50_ms": added_ms}


async def execs(client: DSecClient, *, quick: bool) -> dict[str, Any]:
    """``true`` in a sandbox without a policy and in one with, in turns."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    boxes = {p: await client.run_container(_args(policy=p)) for p in (False, True)}
    for number in range(WARM_ROUNDS + (QUICK_EXECS if quick else EXECS)):
        for policy, box in sorted(boxes.items(), reverse=bool(number % 2)):
            took = await timed(lambda box=box: box.exec("true"))  # type: ignore[misc]
            if number >= WARM_ROUNDS:
                samples[policy].append(took)
    for box in boxes.values():
        await box.stop()
    return _beside("exec", samples)


def _beside(what: str, samples: dict[bool, list[float]]) -> dict[str, Any]:
    off, on = percentile(samples[False], 0.5), percentile(samples[True], 0.5)
    return {
        f"{what}_plain_p50_ms": round(off * 1e3, 2), f"{what}_policy_p50_ms": round(on * 1e3, 2),
        f"{what}_policy_ratio": round(on / off, 3), f"{what}_slowdown": round(on / off - 1, 3),
    }  # fmt: skip


async def changes(client: DSecClient) -> dict[str, Any]:
    """From the SDK's call to the reset of an open connection, as a process in the sandbox
    sees it, and to the call's return."""
    resets, returns = [], []
    box = await client.run_container(
        DSecContainerRunArgs(container_image=BASE, memory_limit_mb=512, network_rules=OPEN)
    )
    flow = await box.spawn("python3", "-c", FLOW)
    lines = _lines(flow)
    for _ in range(CHANGES):
        if await anext(lines) != "open":
            raise RuntimeError("the connection does not open")
        began = time.monotonic()
        async with asyncio.timeout(RESET_S):
            await box.set_network({})
            returns.append(time.monotonic() - began)
            _, at = (await anext(lines)).split()
        resets.append(float(at) - began)
        await box.set_network(OPEN)
        await flow.write(b"\n")
    await box.stop()
    return {
        "change_p50_ms": round(percentile(resets, 0.5) * 1e3, 2),
        "change_max_ms": round(max(resets) * 1e3, 2),
        "change_return_p50_ms": round(percentile(returns, 0.5) * 1e3, 2),
    }  # fmt: skip


async def _lines(process: Any) -> Any:
    held = b""
    async for data in process.stdout:
        *whole, held = (held + data).split(b"\n")
        for line in whole:
            yield line.decode()
