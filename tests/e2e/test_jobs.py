"""A job outlives its trainer: killed, restarted, taken over; on the whole system."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

import libdsec.sync
from libdsec import DSecClient, DSecRunArgs
from libdsec.errors import Conflict, InvalidRequest, NotFound
from services.local import LocalSystem
from shared import ids
from tests.e2e.conftest import alive, charged, open_client, until

FAKE = DSecRunArgs(backend="fake", cpu_cores_limit=0.1, memory_limit_mb=16)

TRAINER = """
import asyncio
from libdsec import DSecClient, DSecRunArgs

async def main():
    args = DSecRunArgs(backend="fake", cpu_cores_limit=0.1, memory_limit_mb=16)
    async with DSecClient() as client, client.job("{job}", lease_s={lease_s}) as job:
        made = await job.create_many(args, n=3, key="step-1", timeout=60)
        await made[0].files.write("/tmp/state", b"half way")
        print(*(s.uid for s in made), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest_asyncio.fixture(loop_scope="session")
async def alone(fake_system: LocalSystem, client: DSecClient) -> AsyncIterator[DSecClient]:
    """A client of a project of its own: nothing else is charged to it."""
    child = await client.projects.create(f"jobs-{ids.new()[-8:]}".lower())
    async with open_client(fake_system, project=child.id) as made:
        yield made


@asynccontextmanager
async def trainer(
    system: LocalSystem, job: str, *, lease_s: float, project: str | None = None
) -> AsyncIterator[Any]:
    """Another process that holds the job; its sandboxes' uids."""
    environment = {
        **os.environ, "DSEC_URL": system.url, "DSEC_API_KEY": system.admin_key,
        "DSEC_PROJECT": project or system.project,
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER.format(job=job, lease_s=lease_s),
        stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            uids = (await process.stdout.readline()).decode().split()
        assert len(uids) == 3
        yield process, uids
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def states(client: DSecClient, job: str) -> set[str]:
    return {s.state async for s in client.list(job=job)}


async def test_a_killed_trainers_job_is_paused_and_its_successor_has_the_same_sandboxes(
    fake_system: LocalSystem, alone: DSecClient
) -> None:
    client, project = alone, alone.project
    async with trainer(fake_system, "killed", lease_s=1, project=project) as (process, uids):
        process.send_signal(signal.SIGKILL)
        await process.wait()

        async def paused() -> bool:
            return await states(client, "killed") == {"paused"}

        await until(paused, what="the job is paused")
    async with client.job("killed") as job:
        assert job.epoch == 2
        assert {s.uid for s in job.sandboxes} == set(uids)
        again = await job.create_many(FAKE, n=3, key="step-1", timeout=60)
        assert [s.uid for s in again] == uids
        assert await again[0].files.read("/tmp/state") == b"half way"
        await charged(client, project, 3)
        await job.stop()
    await charged(client, project, 0)


async def test_a_trainer_that_comes_back_within_its_lease_finds_everything_running(
    fake_system: LocalSystem, client: DSecClient
) -> None:
    async with trainer(fake_system, "quick", lease_s=60) as (process, uids):
        process.send_signal(signal.SIGKILL)
        await process.wait()
        async with client.job("quick") as job:
            assert {s.state for s in job.sandboxes} == {"running"}
            assert {s.uid for s in job.sandboxes} == set(uids)
            await job.stop()


async def test_who_lost_a_job_to_another_process_is_told(
    fake_system: LocalSystem, client: DSecClient
) -> None:
    job = client.job("fenced", lease_s=1)
    await job.open()
    async with open_client(fake_system) as other, other.job("fenced") as taken:
        assert taken.epoch == job.epoch + 1

        async def told() -> bool:
            return job.lost is not None

        await until(told, what="the loss is told")
        assert isinstance(job.lost, Conflict)
        with pytest.raises(Conflict):
            await job.create(FAKE)
        with pytest.raises(Conflict):
            await job.stop()
    await job.close()


async def test_a_whole_job_is_paused_resumed_and_stopped_in_one_request_each(
    client: DSecClient,
) -> None:
    async with client.job("whole") as job:
        made = await job.create_many(FAKE, n=5, timeout=60)
        assert set((await job.pause()).values()) == {"paused"}
        assert await states(client, "whole") == {"paused"}
        assert {s.state for s in made} == {"paused"}
        assert set((await job.resume()).values()) == {"running"}
        info = await job.info()
        assert (info.state, info.sandboxes) == ("leased", {"running": 5})
        assert set((await job.stop()).values()) == {"stopped"}
        assert "whole" in [j.job async for j in client.jobs.list()]


async def test_stopping_a_job_while_it_is_being_made_leaves_nothing(alone: DSecClient) -> None:
    for n in range(5):
        async with alone.job(f"race-{n}") as job:
            creates = asyncio.gather(
                *(job.create_many(FAKE, n=4, timeout=60) for _ in range(3)),
                return_exceptions=True,
            )
            await asyncio.sleep(0.004 * n)
            await job.stop()
            await creates
            # what was asked for after the stop is the trainer's own
            await job.stop()
            assert await alive(alone, job=job.id) == []
    await charged(alone, alone.project, 0)


async def test_the_same_key_with_other_arguments_is_a_conflict(client: DSecClient) -> None:
    async with client.job("keys") as job:
        first = await job.create(FAKE, key="a", timeout=60)
        assert (await job.create(FAKE, key="a", timeout=60)).uid == first.uid
        other = DSecRunArgs(backend="fake", cpu_cores_limit=0.2, memory_limit_mb=16)
        with pytest.raises(Conflict):
            await job.create(other, key="a", timeout=60)
        await job.stop()


@pytest.mark.parametrize(
    ("facts", "field"),
    [({"lease_s": 0}, "lease_s"), ({"lease_s": 1e9}, "lease_s"), ({"on_lost": "x"}, "on_lost")],
)
async def test_bad_leases_are_refused_by_name(
    client: DSecClient, facts: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.job("bad", **facts)
    assert caught.value.field == field


async def test_an_unknown_job_is_not_found(client: DSecClient) -> None:
    with pytest.raises(NotFound):
        await client.jobs.get("never-heard-of")


async def test_code_without_a_loop_and_the_command_line_have_jobs_too(
    fake_system: LocalSystem,
) -> None:
    def work() -> None:
        options = {
            "url": fake_system.url, "api_key": fake_system.admin_key,
            "project": fake_system.project,
        }  # fmt: skip
        with libdsec.sync.DSecClient(**options) as client, client.job("plain") as job:
            made = job.create(FAKE, timeout=60)
            assert [s.uid for s in job.sandboxes] == [made.uid]
            environment = {**os.environ, "DSEC_URL": options["url"],
                           "DSEC_API_KEY": options["api_key"],
                           "DSEC_PROJECT": options["project"]}  # fmt: skip
            command = [sys.executable, "-m", "libdsec", "job"]
            listed = subprocess.run(
                [*command, "list", "--json"], env=environment, capture_output=True, check=True
            )
            assert '"plain"' in listed.stdout.decode()
            stopped = subprocess.run(
                [*command, "stop", "plain", "--json"], env=environment, capture_output=True,
                check=True,
            )  # fmt: skip
            assert json.loads(stopped.stdout)[0]["outcome"] == "stopped"

    await asyncio.to_thread(work)
