"""What ended long ago is forgotten in portions; what lives, or is asked for, is not."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from services.scheduler import retention
from services.scheduler.settings import KEEP_LEAST_S
from shared.errors import InvalidRequest
from shared.settings import load
from tests.integration.scheduler.conftest import Settings, World

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
TABLES = ("sandbox", "transition", "request", "spec")


async def counts(world: World) -> dict[str, int]:
    return {t: (await world.sql(f"select count(*) from {t}"))[0][0] for t in TABLES}


async def test_ended_sandboxes_go_with_all_that_hangs_on_them(world: World) -> None:
    app = await world.scheduler(forget_s=3600.0, reconcile_rows=2)
    trainer = await world.trainer()
    await world.edge("n1")
    ended, alive, young = [await trainer.create(n) for n in (5, 1, 1)]
    half = await trainer.create(2)  # one of them ends
    await trainer.settled([*ended, *alive, *young, *half])
    await trainer.operate("stop", [*ended, *young, half[0]])
    await world.sql(
        "update sandbox set changed_at = now() - make_interval(secs => $1) "
        "where not uid = any($2)", app.settings.keep_ended_s + 1, young,
    )  # fmt: skip
    await world.sql("update request set at = now() - interval '1 year'")
    assert (await counts(world))["sandbox"] == 9
    assert await app.reconciler.forget() == 6 + 1  # six sandboxes, one request
    left = {r[0] for r in await world.sql("select uid from sandbox")}
    assert left == {*alive, *young, half[1]}
    assert left == {r[0] for r in await world.sql("select distinct uid from transition")}
    assert await counts(world) == {
        "sandbox": 3, "request": 3, "spec": 3,
        "transition": 3 * 3 + 2,  # a start has three, a stop two
    }  # fmt: skip
    assert await world.committed() == {"n1": 2}
    assert await app.reconciler.forget() == 0
    stopped = await trainer.operate("stop", [*alive, half[1]])
    assert {r.state for r in stopped.values()} == {"stopped"}


async def test_nodes_lost_long_ago_go_unless_cordoned(world: World) -> None:
    app = await world.scheduler()
    for node in ("young", "old", "shut"):
        await world.edge(node)
    keep_s = app.settings.node_keep_s
    old = text(
        "update node set lost_at = now() - make_interval(secs => :age), "
        "admin = case id when 'shut' then 'cordoned' else 'ready' end where id <> 'young'"
    )
    async with app.db.transaction() as connection:  # no heartbeat comes between
        await connection.execute(old, {"age": keep_s + 1})
        assert await retention.nodes(connection, keep_s=keep_s, limit=10) == 1
        left = await connection.execute(text("select id from node"))
        assert {row[0] for row in left} == {"young", "shut"}


async def test_retention_is_longer_than_a_command_may_be_on_its_way() -> None:
    env = {"DSEC_PG_DSN": "postgresql://", "DSEC_REDIS_URL": "redis://"}
    assert load(Settings, env).keep_ended_s > KEEP_LEAST_S
    with pytest.raises(InvalidRequest, match="keep_ended_s"):
        load(Settings, {**env, "DSEC_KEEP_ENDED_S": "60"})
