"""The pool of warm shells: never more than it should have, and first come first served."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from services.edge.drivers.container import pool
from services.edge.drivers.container.pool import Pool
from services.edge.drivers.container.settings import ContainerSettings, from_options
from shared.errors import InvalidRequest, Unavailable


@dataclass(eq=False)
class FakeShell:
    number: int
    alive: bool = True


class Maker:
    """Makes shells when told to; counts how many there are at most."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.made = 0
        self.alive = 0
        self.most = 0
        self.fail = 0

    async def make(self) -> FakeShell:
        self.alive += 1
        self.most = max(self.most, self.alive)
        try:
            await self.gate.wait()
            if self.fail:
                self.fail -= 1
                raise Unavailable("no engine")
        except BaseException:
            self.alive -= 1
            raise
        self.made += 1
        return FakeShell(self.made)

    async def drop(self, _shell: FakeShell) -> None:
        await asyncio.sleep(0)
        self.alive -= 1

    def pool(self, size: int = 3, most: int = 5, concurrency: int = 8) -> Pool[FakeShell]:
        return Pool(self.make, self.drop, size=size, most=most, concurrency=concurrency,
                    retry_s=0.0)  # fmt: skip


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_shells_being_made_count() -> None:
    """(B12) A slow engine is not asked again and again."""
    maker = Maker()
    pool = maker.pool()
    pool.open()
    for _ in range(50):
        pool._fill()
        await asyncio.sleep(0)
    assert (pool.making, maker.most) == (3, 3)
    maker.gate.set()
    await settle()
    assert (pool.ready, maker.alive) == (3, 3)
    await pool.close()
    assert maker.alive == 0


async def test_those_who_wait_raise_the_target_up_to_the_most() -> None:
    maker = Maker()
    pool = maker.pool(size=1, most=4)
    pool.open()
    takers = [asyncio.ensure_future(pool.take()) for _ in range(6)]
    await settle()
    assert maker.most == 4
    maker.gate.set()
    taken = await asyncio.gather(*takers)
    assert [s.number for s in taken] == [1, 2, 3, 4, 5, 6]
    await pool.close()


async def test_refill_is_bounded_by_its_concurrency() -> None:
    maker = Maker()
    pool = maker.pool(size=5, most=5, concurrency=2)
    pool.open()
    await settle()
    assert pool.making == 2
    maker.gate.set()
    await settle()
    assert pool.ready == 5
    await pool.close()


async def test_claims_that_come_together_are_not_disturbed_by_their_replacement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool that is half empty is filled soon, but not among the claims that made it so."""
    maker = Maker()
    maker.gate.set()
    made = maker.pool(size=4, most=8)
    made.open()
    await settle()
    monkeypatch.setattr(pool, "REFILL_AFTER_S", 3600.0)
    monkeypatch.setattr(pool, "HALF_EMPTY_S", 3600.0)
    await made.take()
    await made.take()
    monkeypatch.setattr(pool, "HALF_EMPTY_S", 0.0)
    await made.take()
    assert (made.ready, made.making) == (1, 0)
    async with asyncio.timeout(60):
        while made.ready < 4:
            await asyncio.sleep(0)
    await made.close()


async def test_a_dead_shell_is_not_handed_out() -> None:
    maker = Maker()
    maker.gate.set()
    pool = maker.pool(size=2)
    pool.open()
    await settle()
    pool._ready[0].alive = False
    assert (await pool.take()).number == 2
    await pool.close()


async def test_failures_are_retried_and_the_last_one_is_known() -> None:
    maker = Maker()
    maker.gate.set()
    maker.fail = 3
    pool = maker.pool(size=1)
    pool.open()
    await settle()
    assert (await pool.take()).alive
    await pool.close()


async def test_who_waits_for_a_shell_that_fails_is_told() -> None:
    maker = Maker()
    maker.fail = 1
    pool = maker.pool(size=0, most=1)
    pool.open()
    first, second = asyncio.ensure_future(pool.take()), asyncio.ensure_future(pool.take())
    await settle()
    maker.gate.set()
    with pytest.raises(Unavailable, match="no engine"):
        await first
    assert (await second).alive
    await pool.close()


async def test_a_cancelled_taker_gives_its_turn_back() -> None:
    maker = Maker()
    pool = maker.pool(size=0, most=2)
    pool.open()
    first = asyncio.ensure_future(pool.take())
    second = asyncio.ensure_future(pool.take())
    await settle()
    first.cancel()
    maker.gate.set()
    assert (await second).alive
    await settle()
    await pool.close()
    assert maker.alive == 1  # the second's own


async def test_taking_from_a_closed_pool_is_unavailable() -> None:
    pool = Maker().pool()
    with pytest.raises(Unavailable):
        await pool.take()


def test_options_become_settings(tmp_path) -> None:
    made = from_options("n1", tmp_path, {"pool_size": "7", "engine_s": "2.5", "aether": "/a"})
    assert (made.pool_size, made.engine_s, str(made.aether)) == (7, 2.5, "/a")
    assert isinstance(made, ContainerSettings)


@pytest.mark.parametrize("options", [{"nope": "1"}, {"pool_size": "many"}, {"node": "x"}])
def test_a_bad_option_is_named(tmp_path, options: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_options("n1", tmp_path, options)
    assert caught.value.field in options
