"""A sandbox's life through the scheduler: create, run, pause, resume, stop."""

from __future__ import annotations

import pytest

from schemas.base import WireError
from tests.integration.scheduler.conftest import World
from tests.integration.scheduler.world import eventually

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def test_create_run_stop(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(3, job="j", labels={"a": "b"})
    for result in await trainer.settled(uids):
        assert (result.state, result.node, result.error) == ("running", "n1", None)
        assert result.id == f"n1-{result.uid}"
    assert await world.committed() == {"n1": 3}
    results = await trainer.operate("stop", uids)
    assert {r.state for r in results.values()} == {"stopped"}
    assert edge.live == {}
    assert await world.committed() == {"n1": 0}
    for uid in uids:
        await eventually(lambda u=uid: trainer.states_told(u) == ["running", "stopped"])
    rows = await world.sql(
        "select source, target from transition where uid = $1 order by id", uids[0]
    )
    assert [tuple(r) for r in rows] == [
        ("requested", "placed"), ("placed", "starting"), ("starting", "running"),
        ("running", "stopping"), ("stopping", "stopped"),
    ]  # fmt: skip


async def test_what_auth_refused_is_rejected_with_its_error(world: World) -> None:
    await world.scheduler()
    trainer = await world.trainer()
    error = WireError(code="quota_exceeded", message="no", field="sandboxes", cause="quota")
    uids = await trainer.create(2, refused=error)
    for result in await trainer.settled(uids):
        assert result.state == "rejected"
        assert result.error == error
    await eventually(lambda: [e.state for e in trainer.events] == ["rejected", "rejected"])


async def test_pause_and_resume(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(2)
    await trainer.settled(uids)
    assert {r.state for r in (await trainer.operate("pause", uids)).values()} == {"paused"}
    assert set(edge.live.values()) == {"paused"}
    assert {r.state for r in (await trainer.operate("resume", uids)).values()} == {"running"}
    again = await trainer.operate("resume", uids)
    assert {r.error for r in again.values()} == {None}
