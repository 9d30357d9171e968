"""The SDK and the command line with the real services and the fake backend."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from libdsec import (
    DSecClient,
    DSecRunArgs,
    FileNotFound,
    Forbidden,
    Info,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    _ids,
    sync,
)
from libdsec._wire import GradingObservation
from services.local import LocalOptions, LocalSystem
from tests.e2e.conftest import UNMOVED
from tests.integration.libdsec.conftest import until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FAKE = DSecRunArgs(backend="fake", cpu_cores_limit=0.2, memory_limit_mb=32)
REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 8.0  # it can be taken back in time on a busy machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalSystem]:
    folder = tmp_path_factory.mktemp("system")
    options = LocalOptions(driver="fake", state_dir=folder, env=UNMOVED)
    async with LocalSystem(options) as system:
        yield system


@pytest.fixture(scope="module")
def options(system: LocalSystem) -> dict[str, str]:
    return {"url": system.url, "api_key": system.admin_key, "project": system.project}


@pytest_asyncio.fixture(loop_scope="module")
async def client(options: dict[str, str]) -> AsyncIterator[DSecClient]:
    async with DSecClient(**options) as client:
        yield client


async def test_life_files_and_facts(client: DSecClient) -> None:
    args = DSecRunArgs(backend="fake", labels={"task": "t"}, memory_limit_mb=64)
    async with await client.create(args, timeout=60) as sandbox:
        info = await sandbox.info()
        assert isinstance(info, Info)
        assert (info.state, info.limits["memory_limit_mb"]) == ("running", 64)
        assert set(info.usage) >= {"cpu_s", "memory_bytes", "pids"}
        files = sandbox.files
        data = random.Random(1).randbytes(3_000_000)
        assert await files.write("/big", data) == len(data)
        assert await files.read("/big") == data
        await files.mkdir("/d/e")
        await files.append("/d/e/f", "x")
        assert [e.path for e in await files.list("/d", recursive=True)] == ["/d/e", "/d/e/f"]
        await files.move("/d/e/f", "/g")
        assert await files.exists("/g")
        await files.remove("/d", recursive=True)
        with pytest.raises(FileNotFound, match="/d/e/f"):
            await files.read("/d/e/f")
        await sandbox.set_timeout(600, deadline_s=3600)
    assert sandbox.state == "stopped"


async def test_a_paused_sandbox_resumes_by_use(client: DSecClient) -> None:
    sandbox = await client.create(FAKE, timeout=60)
    await sandbox.pause()
    assert (await sandbox.info()).state == "paused"
    assert (await sandbox.exec("echo woke")).text == "woke\n"
    await sandbox.resume()
    assert sandbox.state == "running"


async def test_none_removes_a_limit_and_what_is_left_out_stays(client: DSecClient) -> None:
    async with await client.create(FAKE, timeout=60) as sandbox:
        await sandbox.set_timeout(600, deadline_s=DEADLINE_S)
        await sandbox.set_timeout(None)
        await sandbox.set_timeout(deadline_s=None)
        await asyncio.sleep(DEADLINE_S + 0.5)
        assert (await sandbox.exec("echo on")).text == "on\n"
        for nothing in ({}, {"deadline_s": 0}):
            with pytest.raises(InvalidRequest):
                await sandbox.set_timeout(**nothing)


async def test_a_verifier_has_a_sandbox_for_itself_and_after_its_time(
    options: dict[str, str],
) -> None:
    """By the synchronous face; the other one is put to it on containers."""

    def work() -> None:
        with sync.DSecClient(**options) as client:
            sandbox = client.create(replace(FAKE, scoring_grace_s=300), timeout=60)
            with sandbox.verifying(lease_s=60) as held:
                assert isinstance(held, sync.Verifying)
                held.alone()
                with pytest.raises(sync.Conflict):
                    sandbox.exec("true")
                assert held.exec("echo mine").text == "mine\n"
            assert held.lost is None
            assert sandbox.exec("echo ours").text == "ours\n"
            sandbox.set_timeout(deadline_s=0.3)
            with pytest.raises(sync.SandboxDied) as died:
                sandbox.exec("sleep 600", timeout=120)
            assert died.value.cause == "deadline"
            with sandbox.verifying() as held:
                assert held.exec("echo mine").text == "mine\n"
            sandbox.stop()

    await asyncio.to_thread(work)


async def test_a_run_that_ended_is_answered_from_the_log(options: dict[str, str]) -> None:
    """By plain functions in threads, with a model; the second time their sandboxes are gone."""
    replayed, asked = list[int](), list[str]()

    def model(question: str) -> str:
        asked.append(question)
        return f"echo {question} {_ids.new()}"

    def loop(rollout: Any) -> str:
        sandbox = rollout.sandbox(FAKE)
        commands = [rollout.ask(f"{rollout.prompt}{n}", model) for n in range(3)]
        said = "".join(sandbox.exec(command).text.split()[0] for command in commands)
        replayed.append(sandbox.replayed)
        return said

    def work() -> list[Any]:
        with sync.DSecClient(**options) as client:
            return sync.rollout.here(client, "plain", loop=loop, prompts=["a", "b"], at_once=2)

    first = await asyncio.to_thread(work)
    assert [(r.value, r.error) for r in first] == [("a0a1a2", None), ("b0b1b2", None)]
    assert await asyncio.to_thread(work) == first
    assert (replayed, sorted(asked)) == ([0, 0, 6, 6], ["a0", "a1", "a2", "b0", "b1", "b2"])


async def test_streams_and_input(client: DSecClient) -> None:
    sandbox = await client.create(FAKE, timeout=60)
    data = b"0123456789abcdef" * 400_000
    result = await sandbox.exec("cat", stdin=data, output_limit_bytes=1 << 30)
    assert (result.exit_code, result.truncated, result.stdout) == (0, (0, 0), data)
    process = await sandbox.spawn("cat")
    await process.write("one\n")
    assert await anext(process.stdout) == b"one\n"
    await process.kill()
    assert (await process.wait()).signal == "KILL"
    over = await sandbox.exec("bytes 10001", output_limit_bytes=10_000)
    assert (over.truncated[0] > 0, len(over.stdout) + over.truncated[0]) == (True, 10_001)


async def test_events_are_told(client: DSecClient) -> None:
    job = _ids.new()
    seen: list[str] = []

    async def watch() -> None:
        async for event in client.events(job=job):
            seen.append(event.state)
            if event.state == "stopped":
                return

    watching = asyncio.create_task(watch())
    await until(lambda: client._core.link._subscriptions)  # on the connection of what follows
    args = DSecRunArgs(backend="fake", job=job)
    sandbox = await client.create(args, timeout=60)
    assert [s.id async for s in client.list(job=job)] == [sandbox.id]
    assert await client.stop_many(job=job) == {sandbox.uid: "stopped"}
    await asyncio.wait_for(watching, 60)
    assert seen == ["running", "stopped"]


async def test_projects_keys_grants_and_quotas(client: DSecClient, options: dict[str, str]) -> None:
    project = await client.projects.create("team")
    assert project.id in [p.id for p in await client.projects.list()]
    key = await client.keys.create("reader", project=project.id, grants=["sandbox.list"])
    assert [k.id for k in await client.keys.list(project=project.id)] == [key.id]
    await client.quotas.create(project=project.id, sandboxes=3, cores=1.5)
    quota = await client.quotas.get(project.id)
    assert (quota.limit.sandboxes, quota.limit.cores, quota.used.sandboxes) == (3, 1.5, 0)
    mine = {**options, "api_key": key.secret or "", "project": project.id}
    async with DSecClient(**mine) as reader:
        assert (await reader.whoami()).principal == key.principal
        with pytest.raises(Forbidden):
            await reader.create(FAKE, timeout=60)
    given = ["sandbox.create", "sandbox.stop", "sandbox.get", "sandbox.exec"]
    await client.grants.create(key.principal, given, project=project.id)
    async with DSecClient(**mine) as maker:
        sandbox = await maker.create(FAKE, timeout=60)
        assert (await sandbox.exec("echo mine")).text == "mine\n"
    await client.grants.delete(key.principal, ["sandbox.create"], project=project.id)
    left = await client.grants.list(principal=key.principal, project=project.id)
    assert "sandbox.create" not in left
    await client.keys.delete(key.id, project=project.id)
    with pytest.raises(Unauthenticated):
        await DSecClient(**mine).open()


async def test_a_grant_given_under_way_works_without_a_new_client(
    client: DSecClient, options: dict[str, str]
) -> None:
    """The connection is dropped and comes back with the new permissions."""
    key = await client.keys.create("growing", grants=["sandbox.list", "sandbox.stop"])
    async with DSecClient(**{**options, "api_key": key.secret or ""}) as growing:
        with pytest.raises(Forbidden):
            await growing.create(FAKE, timeout=60)
        await client.grants.create(key.principal, ["sandbox.create"])
        async with asyncio.timeout(120):
            while True:
                try:
                    await growing.create(FAKE, timeout=60)
                    break
                except Forbidden:
                    await asyncio.sleep(0.2)
        await client.keys.delete(key.id)
        async with asyncio.timeout(60):
            while True:
                try:
                    _ = [s async for s in growing.list()]
                    await asyncio.sleep(0.2)
                except Unauthenticated:
                    break
        growing._core.owned.clear()


async def test_nodes_and_audit(client: DSecClient) -> None:
    node = (await client.nodes.list())[0]
    assert node.backends["fake"].supported
    await client.nodes.cordon(node.id)
    assert (await client.nodes.get(node.id)).state == "cordoned"
    await client.nodes.uncordon(node.id)
    while len(entries := [e async for e in client.audit.list(limit=5)]) < 5:
        await asyncio.sleep(0.05)  # a record comes after its answer
    assert [e.seq for e in entries] == sorted((e.seq for e in entries), reverse=True)


async def test_an_edge_that_restarts_under_operations(
    system: LocalSystem, client: DSecClient
) -> None:
    sandbox = await client.create(FAKE, timeout=60)
    edge = next(name for name in system.services if name.startswith("edge"))
    await system.kill(edge)
    running = asyncio.create_task(sandbox.exec("echo after"))
    await asyncio.sleep(0.5)
    await system.restart(edge)
    assert (await asyncio.wait_for(running, 120)).text == "after\n"


async def test_the_server_restarts_under_a_command(
    system: LocalSystem, client: DSecClient
) -> None:
    sandbox = await client.create(FAKE, timeout=60)
    running = asyncio.create_task(sandbox.exec("echo a; sleep 3; echo b"))
    await asyncio.sleep(0.5)
    await system.infra.kill("nats")
    await asyncio.sleep(0.5)
    await system.infra.restart("nats")
    assert (await asyncio.wait_for(running, 120)).text == "a\nb\n"


async def test_the_synchronous_face(options: dict[str, str]) -> None:
    def work() -> str:
        with sync.DSecClient(**options) as client:
            sandbox = client.create(FAKE, timeout=60)
            client.nodes.list()
            return sandbox.exec("echo sync").text

    assert await asyncio.get_running_loop().run_in_executor(None, work) == "sync\n"


class Cli:
    def __init__(self, options: dict[str, str]) -> None:
        given = {f"DSEC_{name.upper()}": value for name, value in options.items()}
        self.env = {**os.environ, **given, "PYTHONPATH": str(REPOSITORY)}

    async def __call__(self, *argv: str) -> Any:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "libdsec", *argv, env=self.env,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, f"{argv}: {err.decode()}"
        return json.loads(out) if "--json" in argv else out.decode()


async def test_the_command_line(options: dict[str, str]) -> None:
    dsec = Cli(options)
    assert (await dsec("whoami", "--json"))["project"] == options["project"]
    project = (await dsec("project", "create", "cli", "--json"))[0]["id"]
    assert project in await dsec("project", "ls")
    key = await dsec("key", "create", "sandbox.list", "--of", project, "--json")
    assert key["secret"].startswith("dsec_")
    await dsec("grant", "create", key["principal"], "sandbox.get", "--of", project)
    assert "sandbox.get" in await dsec("grant", "list", key["principal"], "--of", project)
    await dsec("grant", "delete", key["principal"], "sandbox.get", "--of", project)
    await dsec("quota", "create", project, "--sandboxes", "7")
    assert (await dsec("quota", "get", project, "--json"))["limit"]["sandboxes"] == 7
    assert "7" in await dsec("quota", "get", project)
    node = (await dsec("node", "list", "--json"))[0]["id"]
    assert "fake" in await dsec("node", "list")
    assert "fake\tTrue" in await dsec("node", "get", node)
    await dsec("node", "cordon", node)
    await dsec("node", "uncordon", node)
    await dsec("key", "delete", key["id"], "--of", project)
    assert await dsec("image", "list", "--json") == []
    records = await dsec("audit", "query", "--verb", "key.create", "--json", "-n", "5")
    assert isinstance(records, list)
    await dsec("project", "delete", project)
    made = (await dsec("run", "--backend", "fake", "-")).strip()
    assert await dsec("exec", made, "echo", "hi") == "hi\n"
    assert made in await dsec("ps")
    wanted = [("sandbox.create", "ok"), ("sandbox.exec", "ok")]
    reads = {"sandbox.get", "audit.list"}  # the log's readers are in it too
    async with asyncio.timeout(120):  # each service tells a moment later what it recorded
        while len(told := _verbs(await dsec("logs", made, "--json"), besides=reads)) < len(wanted):
            await asyncio.sleep(0.1)
    assert told == wanted
    assert made in await dsec("top", "--once")
    await dsec("stop", made)


def _verbs(logged: list[dict[str, Any]], *, besides: set[str]) -> list[tuple[str, str]]:
    return sorted((r["verb"], r["outcome"]) for r in logged if r["verb"] not in besides)


async def test_the_doctor_says_what_is_missing(options: dict[str, str]) -> None:
    dsec = Cli(options)
    with pytest.raises(AssertionError):  # there is no image
        await dsec("doctor")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "libdsec", "doctor", "--json", env=dsec.env,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    checks = {row["check"]: row["ok"] for row in json.loads(out)}
    assert checks == {"connection": True, "grants": True, "nodes": True, "images": False}
    assert process.returncode == 125


MINE = """
[[rule]]
id = "sleepers"
title = "Sleepers"
severity = "info"
confidence = 1.0
explanation = "{subject} still ran"
match = [ { source = ["grader"], subject = ["sleep*"] } ]
"""


async def test_the_security_teams_commands(
    client: DSecClient, options: dict[str, str], tmp_path: Path
) -> None:
    """From what a grader saw to a finding, with a key that can only look."""
    seen = [GradingObservation(what="process_alive", subject="sleep 99", count=3)]
    async with await client.create(FAKE, timeout=60) as sandbox:
        await client.audit.report(sandbox.uid, seen)
    with pytest.raises(NotFound):
        await client.audit.report(_ids.new(), seen)
    guard = await client.keys.create("guard", grants=["audit.read"])
    dsec = Cli({**options, "api_key": guard.secret or ""})
    told = await dsec("audit", "tail", "--since", "1h", "--count", "1", "--json")
    assert (told["rule"], told["uid"]) == ("processes_at_grading", sandbox.uid)
    assert "sleep 99" in await dsec("audit", "explain", told["id"])
    (row,) = await dsec("audit", "query", "--kind", "finding", "--target", sandbox.id, "--json")
    assert row["id"] == told["id"]
    assert "processes_at_grading" in await dsec("audit", "query", "--since", "1h")
    assert "port_scan" in await dsec("audit", "rules")
    mine = tmp_path / "mine.toml"
    mine.write_text(MINE)
    tried = await dsec("audit", "rules", "--dry-run", str(mine), "--since", "1h", "--json")
    assert [(f["rule"], f["uid"]) for f in tried["findings"]] == [("sleepers", sandbox.uid)]
    lines = (await dsec("audit", "export", "--format", "ocsf", "--kind", "finding")).splitlines()
    assert [json.loads(line)["class_uid"] for line in lines] == [2004]
    plain = (await dsec("audit", "export", "-n", "3")).splitlines()
    assert [sorted({"seq", "hash"} & json.loads(line).keys()) for line in plain] == [
        ["hash", "seq"]
    ] * 3
    chain = await dsec("audit", "verify", "--json")
    assert (chain["intact"], len(chain["head"])) == (True, 64)
    assert await dsec("audit", "suggest", sandbox.id, "--json") == []
