"""Agent loops in worker containers: trainers come and go, the run goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from demo.loops import model
from demo.loops.solve import solve
from demo.workerimage import register
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, rollout
from libdsec.errors import Forbidden, InternalError, NotFound, Unsupported
from libdsec.rollout import _messages as messages
from services.local import ROOT, LocalSystem
from tests.e2e.conftest import open_client, until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

BASE = "py:3.11"
WORKER: dict[str, Any] = {"memory_limit_mb": 512, "cpu_cores_limit": 1, "init_user": "root"}
LINES = ["a", "b", "c"]
RUN_S = 240.0
WAITS = """
from libdsec import DSecContainerRunArgs
async def waits(rollout):
    args = DSecContainerRunArgs(container_image=rollout.prompt, memory_limit_mb=64)
    sandbox = await rollout.sandbox(args)
    rollout.tell("it is there")
    line = "until test -e /tmp/go; do sleep 0.2; done"
    return (await sandbox.exec(line, timeout=300)).exit_code
"""
TRAINER = """
import asyncio, sys
from libdsec import DSecClient, DSecContainerRunArgs, rollout
from demo.loops.solve import solve
from tests.e2e.test_rollout import WORKER, task
async def main():
    async with DSecClient() as client:
        args = DSecContainerRunArgs(layers=sys.argv[2].split(","), **WORKER)
        run = await rollout.submit(client, sys.argv[1], loop=solve, prompts=[task()],
                                   group_size=3, args=args, routes=["model"])
        async for event in run.events():
            print(event.seq, flush=True)
asyncio.run(main())
"""

LOOPING = """
import asyncio, sys
from libdsec import DSecClient, rollout
from demo.loops.solve import solve
from tests.e2e.test_rollout import LINES, task
async def told(r):
    print("begun", flush=True)
    if r.index == 3:  # so that there is a middle, however late the kill comes
        await asyncio.sleep(600)
    found = await solve(r)
    await (await r.sandbox(None)).stop()
    print("ended", flush=True)
    return found
async def main():
    async with DSecClient(keep=True) as client:
        await rollout.here(client, "looping", loop=told, prompts=[task(), task(LINES[:2])],
                           group_size=2, at_once=2, routes={"model": int(sys.argv[1])})
asyncio.run(main())
"""


def task(lines: Sequence[str] = LINES) -> dict[str, Any]:
    """A prompt: the model writes ``lines`` one by one; right is who has each once."""
    return {
        "image": BASE, "task": {"file": "/tmp/lines", "lines": list(lines)},
        "check": f"test \"$(cat /tmp/lines)\" = \"$(printf '%s\\n' {' '.join(LINES)})\"",
    }  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def layers(container_system: LocalSystem) -> Sequence[str]:
    """The layers of a worker."""
    async with open_client(container_system) as client:
        return await register(client, Path(container_system.options.image_roots[1]), base=BASE)


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def serving(container_system: LocalSystem) -> AsyncIterator[tuple[model.Model, int]]:
    """A model that never says the same twice, also reached by the route of this name."""
    number = int(container_system.options.env["DSEC_ROUTES"].rpartition(":")[2])
    async with model.serving(number) as served:
        yield served


@pytest.fixture(scope="module")
def port(serving: tuple[model.Model, int]) -> int:
    return serving[1]


@pytest.fixture
def said(serving: tuple[model.Model, int]) -> Counter[str]:
    """How often the model is asked what, from here on."""
    serving[0].asked.clear()
    return serving[0].asked


async def submitted(
    client: DSecClient, run_id: str, layers: Sequence[str], **changes: Any
) -> rollout.Run:
    """A run of the demonstration's loop."""
    given: dict[str, Any] = {
        "loop": solve, "prompts": [task(), task(LINES[:2])], "group_size": 2,
        "args": DSecContainerRunArgs(layers=layers, **WORKER), "routes": ["model"],
    }  # fmt: skip
    return await rollout.submit(client, run_id, **{**given, **changes})


async def finished(run: rollout.Run) -> list[rollout.Result]:
    async with asyncio.timeout(RUN_S):
        return await run.results()


async def test_the_same_loop_runs_in_the_trainer_and_in_a_worker(
    containers: DSecClient, layers: Sequence[str], port: int
) -> None:
    mine = await rollout.here(
        containers, "both-here", loop=solve, prompts=[task(), task(LINES[:2])], group_size=2,
        routes={"model": port},
    )  # fmt: skip
    async with await submitted(containers, "both-there", layers) as run:
        theirs = await finished(run)
        await run.stop()
    assert [r.value for r in mine] == [r.value for r in theirs]
    assert [r.value["reward"] for r in mine] == [1.0, 1.0, 0.0, 0.0]
    assert [(r.prompt, r.sample) for r in theirs] == [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_a_killed_trainer_with_its_loop_goes_on_without_replay(
    container_system: LocalSystem, containers: DSecClient, layers: Sequence[str], port: int,
    said: Counter[str],
) -> None:  # fmt: skip
    """The loop runs in a trainer that gets SIGKILL in the middle, when some rollouts have
    ended already. Its successor comes to what a worker comes to, and every line of theirs
    was written once: else the check that compares them would fail. The model, which says it in
    other words each time, is asked again only what nobody had heard yet."""
    access = {"DSEC_URL": container_system.url, "DSEC_API_KEY": container_system.admin_key,
              "DSEC_PROJECT": container_system.project}  # fmt: skip
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOOPING, str(port), cwd=ROOT, env=os.environ | access,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert trainer.stdout is not None
    async with asyncio.timeout(RUN_S):
        while await trainer.stdout.readline() != b"ended\n":
            pass
        await trainer.stdout.readline()  # something of another one
    trainer.kill()
    await trainer.wait()
    many: dict[str, Any] = {"prompts": [task(), task(LINES[:2])], "group_size": 2}
    told: list[dict[str, Any]] = []

    async def again(r: rollout.Rollout) -> dict[str, Any]:
        found = await solve(r)
        agent = await r.sandbox(args=DSecContainerRunArgs())  # it is there
        told.append({"replayed": agent.replayed, "steps": agent.step})
        return found

    async with asyncio.timeout(RUN_S):
        mine = await rollout.here(
            containers, "looping", loop=again, at_once=2, routes={"model": port}, **many
        )
    asked_again(said, at_once=2, rollouts=4)
    async with await submitted(containers, "looping-there", layers, **many) as run:
        theirs = await finished(run)
        await run.stop()
    assert [r.error for r in mine] == [None] * 4
    assert [r.value for r in mine] == [r.value for r in theirs]
    assert [r.value["reward"] for r in mine] == [1.0, 1.0, 0.0, 0.0]
    assert any(t["replayed"] == t["steps"] > 0 for t in told), "an ended one was done again"
    assert 0 < sum(t["replayed"] for t in told) < sum(t["steps"] for t in told)


def asked_again(said: Counter[str], *, at_once: int, rollouts: int) -> None:
    """Of what was asked nothing was twice, but for what was in flight when its asker died."""
    assert len(said) >= 3 * rollouts
    assert sum(count - 1 for count in said.values()) <= at_once
    assert max(said.values()) <= 2


async def test_a_killed_trainers_successor_hears_the_rest_and_nothing_runs_twice(
    container_system: LocalSystem, containers: DSecClient, layers: Sequence[str]
) -> None:
    """The trainer gets SIGKILL in the middle; the edge, too, a little later."""
    access = {"DSEC_URL": container_system.url, "DSEC_API_KEY": container_system.admin_key,
              "DSEC_PROJECT": container_system.project}  # fmt: skip
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, "killed", ",".join(layers), cwd=ROOT,
        env=os.environ | access, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert trainer.stdout is not None
    seen = [int(await trainer.stdout.readline()) for _ in range(4)]
    trainer.kill()
    await trainer.wait()
    edge = next(name for name in container_system.services if name.startswith("edge-"))
    pid = container_system.pids()[edge]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with await rollout.attach(containers, "killed") as run:
        async with asyncio.timeout(RUN_S):
            rest = [event.seq async for event in run.events(after=seen[-1])]
        assert seen + rest == list(range(len(seen) + len(rest)))
        assert [r.value["reward"] for r in await finished(run)] == [1.0, 1.0, 1.0]
        await run.stop()


async def test_a_worker_that_was_killed_goes_on_when_it_is_submitted_again(
    containers: DSecClient, layers: Sequence[str], tmp_path: Path
) -> None:
    changes = waiting(tmp_path)
    async with await submitted(containers, "dead", layers, **changes) as run:
        async for event in run.events():
            if event.kind == "told":
                break
        await run.worker.exec(f'kill -9 "$(cat {messages.PID})"', user="root", check=True)
        with pytest.raises(InternalError, match="worker of run dead ended"):
            await finished(run)
    async with await submitted(containers, "dead", layers, **changes) as run:
        async with open_like(containers, run.project) as inner:
            (agent,) = [s async for s in inner.list(job="dead") if s.uid != run.worker.uid]
            await agent.files.write("/tmp/go", b"")
        assert [r.value for r in await finished(run)] == [0]
        await run.stop()


async def test_a_killed_workers_successor_has_what_the_model_said(
    containers: DSecClient, layers: Sequence[str], said: Counter[str]
) -> None:
    async with await submitted(containers, "told", layers, at_once=2) as run:
        async for event in run.events():
            if event.kind == "told" and event.data["turn"] == 1:
                break
        await run.worker.exec(f'kill -9 "$(cat {messages.PID})"', user="root", check=True)
    async with await submitted(containers, "told", layers) as run:
        results = await finished(run)
        await run.stop()
    assert [r.error for r in results] == [None] * 4
    assert [r.value["reward"] for r in results] == [1.0, 1.0, 0.0, 0.0]
    asked_again(said, at_once=2, rollouts=4)


def waiting(folder: Path) -> dict[str, Any]:
    """A run of one rollout, which tells of its sandbox and waits for a file in it."""
    (folder / "waits.py").write_text(WAITS)
    return {"loop": f"{folder}/waits.py:waits", "prompts": [BASE], "group_size": 1}


async def test_a_paused_run_stands_still_and_goes_on(
    containers: DSecClient, layers: Sequence[str], tmp_path: Path
) -> None:
    """Its rollout waits for a file that comes only after the pause."""
    async with await submitted(containers, "paused", layers, **waiting(tmp_path)) as run:
        async for event in run.events():
            if event.kind == "told":
                break
        await run.pause()
        async with open_like(containers, run.project) as inner:
            ours = [s async for s in inner.list(job="paused")]
            assert [s.state for s in ours] == ["paused", "paused"]
            listening = asyncio.create_task(finished(run))
            await asyncio.sleep(2.0)
            assert not listening.done()
            assert (await inner.get(run.worker.id)).state == "paused", "listening woke it"
            await run.resume()
            (agent,) = [s for s in ours if s.uid != run.worker.uid]
            await agent.files.write("/tmp/go", b"")
        assert [r.value for r in await listening] == [0]
        await run.stop()


def open_like(client: DSecClient, project: str) -> DSecClient:
    known = client._config
    return DSecClient(url=known.url, api_key=known.api_key, project=project)


async def test_a_worker_may_only_what_its_run_needs(
    containers: DSecClient, layers: Sequence[str]
) -> None:
    """Its key is its own, shows nowhere, and opens nothing but the run's project; it
    reaches the addresses of its routes and no others."""
    look = f"""
        stat -c %a {messages.CREDENTIALS}
        grep -o 'dsec_[^"]*' {messages.CREDENTIALS} >/tmp/key
        cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -cFf /tmp/key
        ls /sys/class/net
    """
    async with await submitted(containers, "bounded", layers) as run:
        found = await run.worker.exec(look, user="root", timeout=60)
        assert found.text.split() == ["600", "0", "lo"]
        text = (await run.worker.files.read(messages.CREDENTIALS, user="root")).decode()
        key = next(line.split('"')[1] for line in text.splitlines() if "api_key" in line)
        async with DSecClient(url=containers._config.url, api_key=key, project=run.project) as it:
            who = await it.whoami()
            assert set(who.grants or []) == {*rollout.GRANTS, "route.bus", "route.model"}
            for call in (it.keys.create("more"), it.projects.create("more")):
                with pytest.raises(Forbidden):
                    await call
        async with DSecClient(
            url=containers._config.url, api_key=key, project=containers.project
        ) as outside:
            with pytest.raises(Forbidden):
                _ = [s async for s in outside.list()]
        await finished(run)
        await run.stop()
        with pytest.raises(DSecError):
            async with DSecClient(url=containers._config.url, api_key=key, project=run.project):
                pass


async def test_nothing_of_a_stopped_run_is_left(
    containers: DSecClient, layers: Sequence[str]
) -> None:
    run = await submitted(containers, "gone", layers)
    project = run.project
    async with run:
        async for event in run.events():
            if event.kind == "told":
                break
        await run.stop()
    assert project not in {p.id for p in await containers.projects.list()}

    async def unused() -> bool:
        return not [s async for s in containers.list(job="gone")]

    await until(unused, what="nothing of the run")
    with pytest.raises(DSecError) as caught:
        await rollout.attach(containers, "gone")
    assert isinstance(caught.value, NotFound | Forbidden)


async def test_routes_need_grants_and_names_that_the_node_knows(
    container_system: LocalSystem, containers: DSecClient
) -> None:
    args = DSecContainerRunArgs(container_image=BASE, memory_limit_mb=64, routes={"model": 9000})
    grants = ["sandbox.create", "sandbox.stop", "sandbox.exec", "sandbox.get", "sandbox.list"]
    key = await containers.keys.create("no-route", grants=grants)
    async with open_client(container_system, api_key=key.secret) as client:
        with pytest.raises(Forbidden) as caught:
            await client.run_container(args, timeout=60)
        assert caught.value.field == "routes"
    strange = DSecContainerRunArgs(container_image=BASE, memory_limit_mb=64, routes={"other": 9000})
    with pytest.raises(Unsupported) as refused:
        await containers.run_container(strange, timeout=60)
    assert refused.value.field == "routes"
    key = await containers.keys.create("route", grants=[*grants, "route.model"])
    async with (
        open_client(container_system, api_key=key.secret) as client,
        await client.run_container(args, timeout=60) as sandbox,
    ):
        question = json.dumps({"task": {"lines": ["x"], "file": "f"}, "said": []})
        ask = (
            "import urllib.request as u;"
            f"print(u.urlopen('http://127.0.0.1:9000/', {question.encode()!r}).read().decode())"
        )
        answer = await sandbox.exec("python3", "-c", ask, timeout=60)  # it listens already
        assert answer.ok, answer.stderr_text
        assert json.loads(answer.text)["command"].startswith("echo x >> f")
        closed = await sandbox.exec("python3", "-c", ask.replace("9000", "9001"), timeout=60)
        assert "refused" in closed.stderr_text
