"""A node whose disk runs full, and whose agents take two seconds to answer: a system
of its own, its node's folder on a small file system."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from libdsec import CapacityExhausted, DeadlineExceeded, Sandbox
from libdsec.errors import NoSpaceLeft
from services.local import LocalOptions, LocalSystem, node_names
from tests.e2e.conftest import UNMOVED, alive, open_client, until
from tests.faults.conftest import CREATE_S, HANG_S, World, container_args, register_image, tool

pytestmark = [pytest.mark.docker, pytest.mark.slow]

AGENT_DELAY_S = 2
DISK_MB, FLOOR_MB = 64, 16
DELAY = """#include <unistd.h>
__attribute__((constructor)) static void late(void) { if (getpid() == 1) sleep(%d); }
"""


def late_agent(folder: Path) -> Path:
    """The agent, built so that as first process it does nothing for a while."""
    (folder / "late.c").write_text(DELAY % AGENT_DELAY_S)
    sources = sorted((Path(__file__).parents[2] / "guest/aether").glob("*.c"))
    built = folder / "aether"
    argv = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-static", "-s", "-o", str(built)]
    tool(*argv, *sources, folder / "late.c")
    return built


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A system whose node has DISK_MB of disk and late agents."""
    state, images = tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("images")
    folder = state.resolve() / "nodes" / node_names(state.resolve(), 1)[0]
    folder.mkdir(parents=True)
    tool("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", folder)
    env = {
        "DSEC_DISK_FLOOR_MB": str(FLOOR_MB), "DSEC_CONTAINER_POOL_SIZE": "1", **UNMOVED,
        "DSEC_CONTAINER_AETHER": str(late_agent(tmp_path_factory.mktemp("late"))),
    }  # fmt: skip
    try:
        options = LocalOptions(state_dir=state, image_roots=[images], env=env)
        async with LocalSystem(options) as system, open_client(system) as client:
            await register_image(client, images)
            yield World(system, client, images)
    finally:
        tool("umount", "--lazy", folder)


async def test_a_sandbox_runs_only_when_its_agent_answers(small: World) -> None:
    """(B17) More are asked for than are warm; each works from its first command on."""
    began = time.monotonic()
    boxes = await small.client.create_many(container_args(), n=3, timeout=CREATE_S)
    assert time.monotonic() - began > AGENT_DELAY_S, "the agents were late"
    for box in boxes:
        assert isinstance(box, Sandbox), box
        assert (await box.exec("echo first")).text == "first\n"
    await small.client.stop_many(boxes)  # type: ignore[arg-type]


async def test_a_full_disk_is_an_error_at_once_and_ends_can_still_be_made(small: World) -> None:
    """(T05) Writes and creates fail by name; removing and stopping work; then all works."""
    client = small.client
    args = container_args(memory_limit_mb=256)  # the small disk is memory, charged to who fills it
    boxes = await client.create_many(args, n=3, timeout=CREATE_S)
    filled, stopped, kept = (b for b in boxes if isinstance(b, Sandbox))

    async def full() -> bool:  # what else the node does may give a little back
        ran = await filled.exec("cat /dev/zero >>/fill; echo x >/rest")
        return not ran.ok and (await filled.exec("stat -f -c %a /")).text == "0\n"

    await until(full, what="a full disk")

    began = time.monotonic()
    for data in (b"x" * 10_000, b"x" * (9 << 20)):
        with pytest.raises(NoSpaceLeft):
            await kept.files.write("/new", data)
    assert not await kept.files.exists("/new"), "nothing of it is left half"
    assert time.monotonic() - began < HANG_S
    began = time.monotonic()
    with pytest.raises((CapacityExhausted, DeadlineExceeded)):  # before or after the next beat
        await client.create(container_args(), timeout=2)
    assert time.monotonic() - began < HANG_S
    assert (await kept.exec("echo works")).text == "works\n"

    began = time.monotonic()
    await stopped.stop()
    assert time.monotonic() - began < HANG_S
    assert (await stopped.info()).state == "stopped"
    began = time.monotonic()
    await filled.files.remove("/fill")
    assert time.monotonic() - began < HANG_S
    await kept.files.write("/new", b"x" * 10_000)
    async with await client.run_container(container_args(), timeout=CREATE_S) as another:
        assert (await another.exec("true")).ok
    await client.stop_many([filled, kept])

    async def none() -> bool:
        return not await alive(client)

    await until(none)
