"""The trajectory log on real containers: scripts that run again, export, provenance,
repetition in a fresh sandbox."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import libdsec.sync
from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    DSecRunArgs,
    FastForward,
    FileNotFound,
    InvalidRequest,
    Sandbox,
    TrajectoryRecord,
)
from libdsec.errors import Conflict, Divergence
from services.local import LocalSystem
from tests.e2e.conftest import open_client, until

REPOSITORY = Path(__file__).parents[2]
ARGS = DSecContainerRunArgs(
    container_image="py:3.11", memory_limit_mb=128, cpu_cores_limit=0.5, init_user="root",
    labels={"suite": "trajectory"},
)  # fmt: skip


@asynccontextmanager
async def sandbox_of(client: DSecClient) -> AsyncIterator[Sandbox]:
    sandbox = await client.run_container(ARGS)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def records_of(sandbox: Sandbox) -> list[TrajectoryRecord]:
    return [record async for record in sandbox.trajectory()]


async def script(steps: FastForward, rounds: int) -> list[Any]:
    """Counts its own steps inside the sandbox; reads what it wrote."""
    found: list[Any] = []
    await steps.files.mkdir("/work")
    for number in range(rounds):
        await steps.run_shell(f"cd /work; x={number}; echo {number} >> count")
        found.append((await steps.run_shell("pwd; echo $x; cat count")).text)
        await steps.files.append("/work/log", f"{number}\n")
        found.append(await steps.files.read("/work/log"))
        found.append((await steps.exec("sh", "-c", "wc -l < count; exit 3")).exit_code)
    return found


async def test_a_script_that_runs_again_gets_its_results_and_goes_on(
    containers: DSecClient,
) -> None:
    async with sandbox_of(containers) as sandbox:
        first = await script(sandbox.fast_forward(), 2)
        async with (await containers.get(sandbox.id)).fast_forward() as steps:
            again = await script(steps, 4)
        assert again[: len(first)] == first
        assert steps.replayed == 11
        assert again[-3:] == ["/work\n3\n0\n1\n2\n3\n", b"0\n1\n2\n3\n", 3]
        assert await sandbox.files.read("/work/count") == b"0\n1\n2\n3\n"
        assert (await sandbox.info()).state == "running"


async def test_what_was_read_is_what_was_there_then(containers: DSecClient) -> None:
    """Also content that came in frames, and listings."""
    async with sandbox_of(containers) as sandbox:
        large = os.urandom(500_000)

        async def look(steps: FastForward) -> tuple[Any, ...]:
            await steps.files.write("/w/large", large)
            names = [e.name for e in await steps.files.list("/w")]
            return names, await steps.files.read("/w/large"), await steps.files.exists("/w/x")

        first = await look(sandbox.fast_forward())
        await sandbox.exec("sh", "-c", "echo other > /w/large; touch /w/x")
        assert first == (["large"], large, False)
        assert await look(sandbox.fast_forward()) == first
        assert await sandbox.files.read("/w/large") == b"other\n"


async def test_a_long_output_is_read_back_whole(
    container_system: LocalSystem, containers: DSecClient
) -> None:
    """By a script that runs again, from the log of what is over, and in the export."""
    shell = "head -c 3000000 /dev/urandom | base64 -w0; head -c 2000000 /dev/zero >&2"
    async with sandbox_of(containers) as sandbox:
        first = await sandbox.fast_forward().exec(shell)
        again = await sandbox.fast_forward().exec(shell)
        assert len(first.stdout) == 4_000_000 and first.truncated == (0, 0)
        assert (again.stdout, again.stderr) == (first.stdout, first.stderr)
        assert again.truncated == (0, 0) and again.seq == first.seq
    log = sandbox.trajectory()

    async def ended() -> list[TrajectoryRecord]:
        return [one for one in await records_of(sandbox) if one.result is not None]

    (record,) = await until(ended, within_s=60, what="the record and its result")
    assert record.result is not None and record.result.truncated[0] > 2_000_000


    async def all_of_it() -> Any:  # its pieces follow the record
        whole = (await log.whole(record)).result
        return whole if whole is not None and whole.truncated == (0, 0) else None

    whole = await until(all_of_it, what="the whole output is with the services")
    assert (whole.stdout, whole.stderr) == (first.stdout, first.stderr)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "libdsec", "trajectory", sandbox.id, "--json", "--whole",
        stdout=subprocess.PIPE, env=environment_of(container_system),
    )  # fmt: skip
    printed, _ = await asyncio.wait_for(process.communicate(), 120)
    assert base64.b64decode(json.loads(printed)["reply"]["stdout"]) == first.stdout


async def test_a_running_command_is_followed_and_does_not_run_twice(
    container_system: LocalSystem, containers: DSecClient
) -> None:
    """(L23)"""
    async with sandbox_of(containers) as sandbox:
        waits = "until [ -e /tmp/go ]; do sleep 0.1; done"
        command = f"echo begun | tee -a /tmp/runs; tee /tmp/in; {waits}; echo done"

        async def work(steps: FastForward) -> Any:
            await steps.exec("echo", "first")
            return await steps.exec("sh", "-c", command, stdin=iter([b"in", b"put\n"]))

        dying = open_client(container_system, keep=True)
        await dying.open()
        task = asyncio.create_task(work((await dying.get(sandbox.id)).fast_forward()))
        watch = sandbox.fast_forward("watch").files

        async def given() -> bool:
            return await watch.exists("/tmp/in") and await watch.read("/tmp/in") == b"input\n"

        await until(given, what="the command has its input")
        await dying.close()
        with pytest.raises(Exception, match="closed"):
            await task
        following = asyncio.create_task(work(sandbox.fast_forward()))
        await asyncio.sleep(0.5)
        assert not following.done(), "it still runs"
        await sandbox.files.write("/tmp/go", b"")
        result = await following
        assert (result.exit_code, result.stdout) == (0, b"begun\ninput\ndone\n")
        assert (await work(sandbox.fast_forward())).stdout == result.stdout
        assert await sandbox.files.read("/tmp/runs") == b"begun\n"


async def test_another_command_at_a_recorded_place_is_a_divergence(
    containers: DSecClient,
) -> None:
    async with sandbox_of(containers) as sandbox:
        steps = sandbox.fast_forward()
        await steps.exec("echo", "1")
        await steps.exec("echo 2 > /tmp/two")
        again = sandbox.fast_forward()
        await again.exec("echo", "1", timeout=5)  # a limit makes no other command
        with pytest.raises(Divergence) as caught:
            await again.exec("echo 3 > /tmp/three")
        error = caught.value
        assert isinstance(error, Conflict)
        assert (error.lane, error.step) == ("main", 2)
        assert (error.recorded, error.asked) == ("echo 2 > /tmp/two", "echo 3 > /tmp/three")
        assert not await sandbox.files.exists("/tmp/three")
        with pytest.raises(Divergence):
            await sandbox.fast_forward().files.write("/tmp/three", b"")
        other = sandbox.fast_forward("other")
        assert (await other.exec("echo", "mine")).text == "mine\n"


async def test_tasks_whose_order_may_change_take_a_thread_each(containers: DSecClient) -> None:
    async with sandbox_of(containers) as sandbox:

        async def agent(steps: FastForward, name: str, pause_s: float) -> list[str]:
            mine, found = steps.thread(name), []
            for number in range(3):
                await asyncio.sleep(pause_s)
                found.append((await mine.exec(f"echo {name}{number} | tee -a /tmp/all")).text)
            return found

        async def work(waits: tuple[float, float]) -> list[list[str]]:
            steps = sandbox.fast_forward()
            return await asyncio.gather(
                agent(steps, "a", waits[0]), agent(steps, "b", waits[1])
            )

        first = await work((0.0, 0.05))
        assert first == [[f"{name}{n}\n" for n in range(3)] for name in "ab"]
        assert await work((0.05, 0.0)) == first
        assert len((await sandbox.files.read("/tmp/all")).splitlines()) == 6
        with pytest.raises(InvalidRequest, match="lane"):
            sandbox.fast_forward("x" * 65)


async def test_a_tree_has_one_place(containers: DSecClient, tmp_path: Path) -> None:
    """Its files are copied at once, in any order; later changes of the agent stay."""
    for number in range(30):
        (tmp_path / f"{number}").write_bytes(b"x" * (number * 5_000))
    async with sandbox_of(containers) as sandbox:

        async def work(steps: FastForward) -> int:
            await steps.files.upload_tree(tmp_path, "/t")
            await steps.exec("echo", "next")
            return len(await steps.files.glob("/t/*"))

        assert await work(sandbox.fast_forward()) == 30
        await sandbox.exec("sh", "-c", "echo changed > /t/29; rm /t/3")
        steps = sandbox.fast_forward()
        assert await work(steps) == 30
        assert steps.step == 3
        assert await sandbox.files.read("/t/29") == b"changed\n"
        assert not await sandbox.files.exists("/t/3")


async def rollout(client: DSecClient, *, stands_at: int | None = None) -> tuple[bytes, int]:
    """A trainer's loop over one sandbox of a job: what it did, and how much of that again.
    It goes no further than to ``stands_at``."""
    args = DSecRunArgs(backend="fake", cpu_cores_limit=0.1, memory_limit_mb=16)
    async with client.job("forward") as job:
        sandbox = await job.create(args, key="prompt-1")
        async with sandbox.fast_forward() as steps:
            for number in range(6):
                if number == stands_at:
                    await asyncio.sleep(600)
                await steps.exec(f"echo {number} >> /n; sleep 0.2")
                print(number, flush=True)
            return await steps.files.read("/n"), steps.replayed


TRAINER = """
import asyncio
from libdsec import DSecClient
from tests.e2e.test_trajectory import rollout

async def main():
    async with DSecClient() as client:
        await rollout(client, stands_at=5)

asyncio.run(main())
"""


async def test_a_killed_trainer_goes_on_where_it_was(
    fake_system: LocalSystem, client: DSecClient
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, stdout=subprocess.PIPE, cwd=REPOSITORY,
        env=environment_of(fake_system),
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(120):
        while await process.stdout.readline() != b"2\n":
            assert process.returncode is None
    process.kill()
    await process.wait()
    done, again = await rollout(client)
    assert done == b"0\n1\n2\n3\n4\n5\n"
    assert 3 <= again <= 5  # what it printed was done, and it may have gone on until it died
    await client.jobs.stop("forward")


def environment_of(system: LocalSystem) -> dict[str, str]:
    return {
        **os.environ, "DSEC_URL": system.url, "DSEC_API_KEY": system.admin_key,
        "DSEC_PROJECT": system.project,
    }  # fmt: skip


async def test_the_log_outlives_its_sandbox(containers: DSecClient) -> None:
    async with sandbox_of(containers) as sandbox:
        await sandbox.exec("echo one; echo two >&2; exit 7", env={"A": "b"}, cwd="/tmp")
        await sandbox.exec("head -c 3000000 /dev/zero | tr '\\0' x")
        await sandbox.files.write("/tmp/f", b"data", mode=0o600)
        with pytest.raises(FileNotFound):
            await sandbox.files.move("/none", "/else")
        live = await records_of(sandbox)
    assert [(r.seq, r.state, r.verb) for r in live] == [
        (1, "done", "exec"), (2, "done", "exec"), (3, "done", "file_write"),
        (4, "done", "file_move"),
    ]  # fmt: skip
    first, second, third, fourth = live
    assert first.result is not None and second.result is not None
    assert (first.result.exit_code, first.result.stderr) == (7, b"two\n")
    assert first.request is not None
    assert (first.request["env"], first.request["cwd"]) == ({"A": "b"}, "/tmp")
    kept = len(second.result.stdout)
    assert kept == 1 << 20 and kept + second.result.truncated[0] == 3_000_000
    assert third.command == "file_write /tmp/f"
    assert fourth.error is not None and fourth.error.code == "not_found"

    async def all_told() -> bool:
        return [r.to_json() for r in await records_of(sandbox)] == [r.to_json() for r in live]

    await until(all_told, what="the services have the log")


async def test_which_command_changed_a_file(containers: DSecClient) -> None:
    async with sandbox_of(containers) as sandbox:
        for number in range(3):
            await sandbox.exec(f"echo {number} > /tmp/file{number}")
            await asyncio.sleep(0.02)
        await sandbox.exec("touch -d 2001-01-01 /tmp/file1")
        await asyncio.sleep(0.02)
        await sandbox.files.write("/tmp/file2", b"by a file verb")
        await asyncio.sleep(0.02)
        await sandbox.exec("cat /tmp/file0 /tmp/file1 /tmp/file2")
        await sandbox.exec("mkdir /tmp/d; touch /tmp/d/gone")
        await asyncio.sleep(0.02)
        await sandbox.exec("rm /tmp/d/gone")
        log = sandbox.trajectory()
        found = {n: await log.changed(f"/tmp/{n}") for n in ("file0", "file1", "file2", "d/gone")}
        assert {n: (p.certain, [c.seq for c in p.candidates]) for n, p in found.items()} == {
            "file0": (True, [1]), "file1": (True, [4]), "file2": (True, [5]),
            "d/gone": (True, [8]),
        }  # fmt: skip
        assert found["d/gone"].path == "/tmp/d"
        assert (await log.changed("/bin/sh")).candidates == ()


async def test_a_session_is_done_again_in_a_fresh_sandbox(containers: DSecClient) -> None:
    async with sandbox_of(containers) as sandbox, sandbox_of(containers) as fresh:
        await sandbox.run_shell("cd /tmp; export X=1")
        await sandbox.files.write("/tmp/in", b"content")
        await sandbox.run_shell("cat in; echo $X; false")
        await sandbox.exec("cat", stdin=b"given")
        server = asyncio.create_task(sandbox.exec("while [ ! -e /tmp/stop ]; do sleep 0.05; done"))
        await asyncio.sleep(0.3)
        await sandbox.exec("date +%N; touch /tmp/stop")
        await server
        found = await sandbox.replay(into=fresh)
        assert found.replayed == 6
        assert [(d.record.seq, d.what) for d in found.differences] == [(6, "stdout")]
        assert await fresh.files.read("/tmp/in") == b"content"


async def test_the_synchronous_face_has_it_all(
    container_system: LocalSystem, containers: DSecClient
) -> None:
    system = container_system

    def model(question: int) -> str:
        return f"{question}: {os.urandom(8).hex()}"

    def work(id: str) -> tuple[int, str, bytes, list[int]]:
        with libdsec.sync.DSecClient(system.url, system.admin_key, system.project) as client:
            box = client.get(id)
            with box.fast_forward() as steps:
                steps.exec("echo once >> /tmp/n")
                steps.files.write("/tmp/s", b"written")
                read = steps.files.read("/tmp/n")
                said = steps.ask(7, model)
            return steps.replayed, said, read, [record.seq for record in box.trajectory()]

    async with sandbox_of(containers) as sandbox:
        first = await asyncio.to_thread(work, sandbox.id)
        assert (first[0], *first[2:]) == (0, b"once\n", [1, 2, 3, 4])
        assert await asyncio.to_thread(work, sandbox.id) == (4, *first[1:])


async def test_the_command_line_exports_a_trajectory(
    container_system: LocalSystem, containers: DSecClient
) -> None:
    async with sandbox_of(containers) as sandbox:
        await sandbox.exec("echo hello > /tmp/x")
        await asyncio.sleep(0.02)  # a few ticks of the clock that stamps files
        await sandbox.exec("true")

        async def dsec(*argv: str) -> str:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "libdsec", "trajectory", sandbox.id, *argv,
                stdout=subprocess.PIPE, env=environment_of(container_system),
            )  # fmt: skip
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0
            return out.decode()

        lines = [json.loads(line) for line in (await dsec("--json")).splitlines()]
        assert [(r["seq"], r["command"]) for r in lines] == [
            (1, "echo hello > /tmp/x"), (2, "true"),
        ]  # fmt: skip
        assert lines[0]["reply"]["exit_code"] == 0
        table = (await dsec("--changed", "/tmp/x")).splitlines()
        assert len(table) == 2 and table[1].endswith("echo hello > /tmp/x")
