"""Faults of a sandbox's life: creates that are cancelled, repeated, late or broken, and
ends that are only said. Through the client, on the whole system."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from libdsec import (
    Conflict,
    DeadlineExceeded,
    DSecClient,
    DSecError,
    NotFound,
    Sandbox,
    SandboxDied,
    Unavailable,
    _ids,
)
from libdsec._calls import Mailbox
from tests.e2e.conftest import alive, open_client, until, used
from tests.faults.conftest import CREATE_S, HANG_S, World, container_args, fake_args
from tests.faults.ledger import Held, held, sandbox_folders

POINTS = 40
"""More points at which a create waits than there are."""


class CancelledAt:
    """Awaits a coroutine and has its task cancelled where it waits for the ``point``-th
    time."""

    def __init__(self, work: Coroutine[Any, Any, Any], point: int) -> None:
        self._work = work
        self._left = point
        self.reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._work.__await__()
        send: Any = inner.send
        value: Any = None
        while True:
            try:
                waited_for = send(value)
            except StopIteration as end:
                return end.value
            self._left -= 1
            if self._left == 0:
                self.reached = True
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                value, send = (yield waited_for), inner.send
            except BaseException as exc:
                value, send = exc, inner.throw


async def nothing_is_left(world: World, client: DSecClient, *, of: str = "fake") -> None:
    """Of the client's project and the backend: no sandbox, no charge, no commitment."""

    async def clean() -> bool:
        node = await client.nodes.get(world.node)
        project = client.project
        there = node.counts.get(of, {}).get(project, 0)
        return not (await alive(client) or await used(client, project) or there)

    await until(clean, what="nothing left")


@pytest_asyncio.fixture(loop_scope="session")
async def project(world: World) -> AsyncIterator[DSecClient]:
    """A client of a project of its own."""
    child = await world.client.projects.create(f"p{_ids.new()[-8:]}")
    async with open_client(world.system, project=child.id) as client:
        yield client


@pytest.mark.parametrize("backend", ["fake", pytest.param("container", marks=pytest.mark.docker)])
async def test_a_create_cancelled_at_any_point_leaves_a_handle_or_nothing(
    world: World, project: DSecClient, backend: str
) -> None:
    """(L02)"""
    args = container_args() if backend == "container" else fake_args(start_delay_s=0.05)

    async def one(point: int) -> tuple[CancelledAt, Sandbox | None]:
        work = CancelledAt(project.create(args, timeout=CREATE_S), point)

        async def run() -> Sandbox:
            return await work  # type: ignore[no-any-return]

        try:
            return work, await asyncio.create_task(run())
        except asyncio.CancelledError:
            return work, None

    points = 0
    kept = []
    for first in range(1, POINTS, 8):
        done = await asyncio.gather(*(one(point) for point in range(first, first + 8)))
        points += sum(work.reached for work, _ in done)
        kept += [sandbox for _, sandbox in done if sandbox is not None]
        if not all(work.reached for work, _ in done):
            break
    else:
        pytest.fail("there are more points")
    assert points >= 2 and kept

    async def only_handles() -> bool:
        return {s.uid for s in await alive(project)} == {s.uid for s in kept}

    await until(only_handles, what="what nobody holds is over")
    await project.stop_many(kept)
    await nothing_is_left(world, project, of=backend)


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.3, 1.0])
async def test_a_create_cancelled_while_the_node_works_leaves_nothing(
    world: World, project: DSecClient, after_s: float
) -> None:
    """(L01)"""
    args = fake_args(start_delay_s=30.0)
    creating = asyncio.create_task(project.create_many(args, n=3, timeout=CREATE_S))
    await asyncio.sleep(after_s)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await nothing_is_left(world, project)


@pytest.mark.docker
async def test_containers_cancelled_while_they_start_leave_nothing(
    world: World, project: DSecClient
) -> None:
    """(L01) No folder of a writable layer either."""
    before = set(sandbox_folders(world))
    tasks = []
    for wait_s in (0.0, 0.005, 0.01, 0.02, 0.04):
        tasks.append(asyncio.create_task(project.create(container_args(), timeout=CREATE_S)))
        await asyncio.sleep(wait_s)
        tasks[-1].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    await project.stop_many([d for d in done if isinstance(d, Sandbox)])
    await nothing_is_left(world, project, of="container")
    await until(lambda: no_other_folder(world, before), what="its folders are gone")


async def no_other_folder(world: World, before: set[Path]) -> bool:
    return set(sandbox_folders(world)) <= before


async def test_a_client_that_dies_in_a_create_leaves_nothing_without_a_job(
    world: World, project: DSecClient
) -> None:
    """(L01) A close while the node works ends what it was asked for."""
    async with open_client(world.system, project=project.project) as mortal:
        creating = asyncio.create_task(mortal.create(fake_args(start_delay_s=2.0)))
        await asyncio.sleep(0.5)
    await asyncio.gather(creating, return_exceptions=True)
    await nothing_is_left(world, project)


async def test_a_lost_answer_and_a_repetition_make_one_sandbox(
    world: World, project: DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(L03)"""
    key = _ids.new()
    with monkeypatch.context() as lossy:
        lossy.setattr(Mailbox, "put", lambda self, item: None)
        lost = asyncio.create_task(project.create(fake_args(), request_id=key, wait=False))
        await asyncio.wait({lost}, timeout=1.0)

    async def one() -> bool:
        return len(await alive(project)) == 1

    await until(one, what="it came up, unknown to its caller")
    async with open_client(world.system, project=project.project, keep=True) as second:
        made = await asyncio.gather(
            *(second.create(fake_args(), request_id=key, timeout=CREATE_S) for _ in range(10))
        )
        other = fake_args(start_delay_s=0.1)
        with pytest.raises(Conflict) as caught:
            await second.create(other, request_id=key, timeout=CREATE_S)
    assert caught.value.field == "request_id"
    assert {s.uid for s in made} == {s.uid for s in await alive(project)}
    assert len({s.uid for s in made}) == 1
    assert await used(project, project.project) == 1
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    await project.stop_many([made[0]])
    with pytest.raises(DSecError):  # over is over: no second one under the same key
        await project.create(fake_args(), request_id=key, timeout=CREATE_S)
    await nothing_is_left(world, project)


async def test_one_key_asked_at_once_by_many_makes_one(world: World, project: DSecClient) -> None:
    """(L03) Ten callers, ten connections, no answer known to any of them before."""
    key = _ids.new()

    async def ask() -> str:
        async with open_client(world.system, project=project.project, keep=True) as client:
            return (await client.create(fake_args(), request_id=key, timeout=CREATE_S)).uid

    uids = await asyncio.gather(*(ask() for _ in range(10)))
    assert len(set(uids)) == 1
    assert [s.uid for s in await alive(project)] == [uids[0]]
    await project.stop_many(uids[:1])
    await nothing_is_left(world, project)


@pytest.mark.docker
@pytest.mark.slow
async def test_a_name_is_free_as_soon_as_its_sandbox_is_gone(
    world: World, project: DSecClient
) -> None:
    """(L05) A failed create holds no name either; fifty times."""
    labels = {"name": "n"}
    for _ in range(50):
        with pytest.raises(NotFound):
            await project.create(container_args(container_image="no-such:1", labels=labels))
        sandbox = await project.create(container_args(labels=labels), timeout=CREATE_S)
        assert [s.uid for s in await alive(project, labels=labels)] == [sandbox.uid]
        await sandbox.stop()
    await nothing_is_left(world, project, of="container")


async def test_a_sandbox_that_never_comes_up_can_be_stopped(
    world: World, project: DSecClient
) -> None:
    """(L06) A driver that hangs, and one that is deaf to being cancelled."""
    for args in (fake_args(start_hang=True), fake_args(start_deaf_s=2.0)):
        sandbox = await project.create(args, wait=False)
        await asyncio.sleep(0.5)
        async with asyncio.timeout(HANG_S):
            await sandbox.stop()
        assert sandbox.state == "stopped"
        await nothing_is_left(world, project)


async def test_a_sandbox_of_an_edge_that_never_answers_can_be_stopped(
    world: World, project: DSecClient
) -> None:
    """(L06) The edge is frozen from before the create until after the stop."""
    pid = world.system.pids()[world.edge]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        sandbox = await project.create(fake_args(), wait=False)
        await asyncio.sleep(0.3)
        stopping = asyncio.create_task(sandbox.stop())
        await asyncio.wait({stopping}, timeout=2.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(HANG_S):
        await stopping
    assert sandbox.state == "stopped"
    await nothing_is_left(world, project)


async def test_a_stop_that_a_frozen_edge_does_not_answer_says_so_and_is_done_later(
    world: World, project: DSecClient
) -> None:
    """(L06) The client is not left waiting, and the sandbox not left running."""
    sandbox = await project.create(fake_args(), timeout=CREATE_S)
    pid = world.system.pids()[world.edge]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(HANG_S):
            with pytest.raises(Unavailable, match=r"stopping: node .* is silent"):
                await sandbox.stop()
        assert (await project.get(sandbox.id)).state == "stopping"
    finally:
        os.kill(pid, signal.SIGCONT)
    await sandbox.stop()
    assert sandbox.state == "stopped"
    await nothing_is_left(world, project)


async def test_a_failed_start_gives_everything_back(world: World, project: DSecClient) -> None:
    """(L07) Whatever it failed of: charges, reservations, the node's commitments."""
    before = (await project.nodes.get(world.node)).committed
    for cause in ("runtime", "image", "internal", "unavailable"):
        results = await project.create_many(fake_args(start_error=cause), n=5, timeout=CREATE_S)
        assert all(isinstance(r, DSecError) for r in results), results
    await nothing_is_left(world, project)

    async def as_before() -> bool:
        now = (await project.nodes.get(world.node)).committed
        return (now.memory_mb, now.sandboxes) == (before.memory_mb, before.sandboxes)

    await until(as_before, what="the node's capacity")


@pytest.mark.docker
async def test_a_broken_image_fails_with_its_reason_and_gives_everything_back(
    world: World, project: DSecClient
) -> None:
    """(L07) A root that cannot be attached: its /etc leads out of it."""
    tree = world.images / "evil"
    tree.mkdir(exist_ok=True)
    if not (tree / "etc").is_symlink():
        (tree / "etc").symlink_to("/run/dsec")
    await project.images.create("evil:1", path=str(tree))
    before = set(sandbox_folders(world))
    with pytest.raises(DSecError) as caught:
        await project.create(container_args(container_image="evil:1"), timeout=CREATE_S)
    assert (caught.value.code, caught.value.cause) == ("invalid_request", "image")
    assert "etc" in caught.value.message
    await nothing_is_left(world, project, of="container")
    await until(lambda: no_other_folder(world, before), what="its folders are gone")


@pytest.mark.docker
async def test_stopped_is_said_only_when_nothing_runs_any_more(
    world: World, project: DSecClient
) -> None:
    """(L28) Processes that hold on to life, and their groups and folders."""
    boxes = await project.create_many(container_args(), n=3, timeout=CREATE_S)
    for box in boxes:
        assert isinstance(box, Sandbox)
        await box.exec("(trap '' TERM INT HUP; while :; do sleep 1; done) & setsid sleep 500 &")
    parts: list[Held] = []

    async def all_run() -> bool:
        parts[:] = [held(world, box.uid) for box in boxes]  # type: ignore[union-attr]
        return all(len(part.pids) >= 4 for part in parts)

    await until(all_run, what="processes in every sandbox")
    for box, part, grace_s in zip(boxes, parts, (0.0, 0.5, 0.0), strict=True):
        await box.stop(grace_s=grace_s)  # type: ignore[union-attr]
        assert part.left() == []
        with pytest.raises((SandboxDied, NotFound, Conflict)):
            await box.exec("true")  # type: ignore[union-attr]
    await nothing_is_left(world, project, of="container")

    async def forgotten() -> bool:
        return not any(part.in_books() for part in parts)

    await until(forgotten, what="containers removed")


async def test_a_create_over_its_deadline_is_an_error_and_leaves_nothing(
    world: World, project: DSecClient
) -> None:
    """(L28)"""
    async with asyncio.timeout(HANG_S):
        with pytest.raises(DeadlineExceeded) as caught:
            await project.create(fake_args(start_delay_s=5 * HANG_S), timeout=1.0)
    assert caught.value.is_infra
    async for sandbox in project.list():
        assert (await sandbox.info()).state not in ("running", "stopped")
    await nothing_is_left(world, project)


async def test_a_death_is_seen_by_all_who_ask(world: World, project: DSecClient) -> None:
    """(L28) State follows the runtime."""
    sandbox = await project.create(fake_args(die_after_s=1.0, die_cause="oom"), timeout=CREATE_S)

    async def failed() -> bool:
        return (await sandbox.info()).state == "failed"

    await until(failed)
    assert (await sandbox.info()).cause == "oom"
    with pytest.raises(SandboxDied):
        await sandbox.exec("true")
    await nothing_is_left(world, project)
