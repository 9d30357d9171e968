"""What must be true after a pause as before: time, randomness, the way in. On containers,
which share the node's kernel; a machine of its own has more to put right."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from libdsec import OutcomeUnknown, Sandbox
from tests.e2e.conftest import until
from tests.faults.conftest import CREATE_S, HANG_S, World, container_args, fake_args

PAUSED_S = 2.0
SKEW_S = 0.5


async def clocks(box: Sandbox) -> tuple[float, float]:
    """Wall clock and time since the machine's start, as a command sees them."""
    text = (await box.exec("date +%s; read up rest </proc/uptime; echo $up")).text
    wall, up = text.split()
    return float(wall), float(up)


async def test_the_clock_goes_on_while_a_sandbox_is_paused(box: Sandbox) -> None:
    """(L20)"""
    before = await clocks(box)
    await box.pause()
    await asyncio.sleep(PAUSED_S)
    began = time.time()
    after = await clocks(box)
    assert int(began) <= after[0] <= time.time()  # whole seconds are shown
    assert after[1] - before[1] > PAUSED_S - SKEW_S
    assert after[0] >= before[0]


async def test_copies_of_an_image_share_no_randomness(world: World) -> None:
    """(L21)"""
    draw = "cat /proc/sys/kernel/random/uuid; head -c 32 /dev/urandom | md5sum"
    made = await world.client.create_many(container_args(), n=4, timeout=CREATE_S)
    boxes = [box for box in made if isinstance(box, Sandbox)]
    assert len(boxes) == 4
    first = [(await box.exec(draw)).text for box in boxes]
    await asyncio.gather(*(box.pause() for box in boxes))
    second = [(await box.exec(draw)).text for box in boxes]
    assert len({*first, *second}) == 8
    await world.client.stop_many(boxes)


async def test_a_stream_and_new_commands_go_on_after_every_pause(box: Sandbox) -> None:
    """(L23)"""
    command = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"
    process = await box.spawn(command)
    lines = process.stdout.lines()
    seen = int(await anext(lines))
    for _ in range(20):
        await box.pause()
        async with asyncio.timeout(HANG_S):
            assert (await box.exec("echo new")).text == "new\n"
            for _ in range(3):
                line = int(await anext(lines))
                assert line == seen + 1
                seen = line
    await process.kill()
    await process.wait()


@pytest_asyncio.fixture(loop_scope="session")
async def fake(world: World) -> AsyncIterator[Sandbox]:
    """A sandbox whose commands end with their edge."""
    async with await world.client.create(fake_args(), timeout=CREATE_S) as sandbox:
        yield sandbox


async def test_a_command_whose_end_nobody_saw_is_unknown_and_not_run_again(
    world: World, fake: Sandbox
) -> None:
    """(L23)"""
    steps = fake.fast_forward()
    await steps.exec("echo once >> /n")
    lost = asyncio.create_task(steps.exec("echo twice >> /n; sleep 60"))

    async def begun() -> bool:
        return b"twice" in await fake.files.read("/n")

    await until(begun, what="the command has begun")
    await world.system.kill(world.edge)
    await world.system.restart(world.edge)
    with pytest.raises(OutcomeUnknown):
        await lost
    left = await fake.files.read("/n")
    again = fake.fast_forward()
    await again.exec("echo once >> /n")
    with pytest.raises(OutcomeUnknown) as caught:
        await again.exec("echo twice >> /n; sleep 60")
    assert caught.value.is_infra
    assert (await again.exec("cat /n")).stdout == left
    counted = await asyncio.to_thread(counters, world, world.edge)
    assert counted["operations_unknown"] >= 1
    assert counted["operations_ended"] > counted["operations_failed_infra"] >= 1
    ended = await asyncio.to_thread(counters, world, "scheduler")
    assert ended["sandboxes_ended"] >= ended["sandboxes_ended_infra"] >= ended["sandboxes_lost"]


def counters(world: World, service: str) -> dict[str, int]:
    """What a service counts, as its health page tells it."""
    port = next(row["health_port"] for row in world.system.table() if row["name"] == service)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as page:
        found: dict[str, int] = json.load(page)["counters"]
    return found
