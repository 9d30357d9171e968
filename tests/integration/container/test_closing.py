"""A driver that closes leaves nothing of its own in the machine's control groups."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.conformance.harness import new_uid
from tests.integration.container.harness import container_harness


async def test_a_closed_driver_leaves_no_control_group(tmp_path: Path) -> None:
    parent = f"dsec-closing-{new_uid()[-8:]}"

    def groups() -> list[Path]:
        return list(Path("/sys/fs/cgroup").glob(f"*/{parent}"))

    async with container_harness(tmp_path, cgroup_parent=parent, pool_size=1) as harness:
        handle = await harness.driver.start(harness.spec(uid=new_uid()))
        assert groups(), "the engine made them"
        await harness.driver.stop(handle)
    assert groups() == []


async def test_a_driver_closed_while_its_pool_fills_leaves_no_control_group(
    tmp_path: Path,
) -> None:
    parent = f"dsec-closing-{new_uid()[-8:]}"
    for delay_s in (0.02, 0.1, 0.2):
        async with container_harness(
            tmp_path / str(delay_s), cgroup_parent=parent, pool_size=4
        ) as harness:
            await harness.driver.stop(await harness.driver.start(harness.spec(uid=new_uid())))
            await asyncio.sleep(delay_s)
        assert list(Path("/sys/fs/cgroup").glob(f"*/{parent}")) == []
    await asyncio.sleep(1.0)
    assert list(Path("/sys/fs/cgroup").glob(f"*/{parent}")) == []
