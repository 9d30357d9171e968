"""From a real container to the security team: excess is found, ordinary work is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    DSecRunArgs,
    Forbidden,
    Sandbox,
)
from libdsec._wire import GradingObservation
from libdsec.audit import Chain
from libdsec.ocsf import FINDING
from libdsec.ocsf import event as ocsf_event
from services.local import LocalSystem
from tests.e2e.conftest import SETTLE_S, open_client, until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

FORKS = """
import os, time
for _ in range(1000):
    try:
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
    except OSError:
        pass
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""
FLOOD = "yes | head -c 90000000"
SUITE = """
mkdir -p /tmp/work/pkg && cd /tmp/work && git init -q . 2>/dev/null
for i in $(seq 40); do echo "def f(x): return x + $i" > pkg/m$i.py; done
cat > test_all.py <<'END'
import importlib, unittest
class All(unittest.TestCase):
    def test_each(self):
        for i in range(1, 41):
            with self.subTest(i):
                self.assertEqual(importlib.import_module(f"pkg.m{i}").f(1), i + 1)
END
python3 -m unittest -v test_all && python3 -m compileall -q -j 4 pkg
seq 300000; git log --oneline -3 2>/dev/null
python3 -m http.server -b 127.0.0.1 8123 >/dev/null 2>&1 &
sleep 1; kill %1; true
"""


@pytest_asyncio.fixture(loop_scope="session")
async def guard(
    container_system: LocalSystem, containers: DSecClient
) -> AsyncIterator[DSecClient]:
    """The security team: its key reads the audit and does nothing else."""
    key = await containers.keys.create("guard", grants=["audit.read"], kind="service")
    async with open_client(container_system, api_key=key.secret) as client:
        yield client
    await containers.keys.delete(key.id)


def args(**more: Any) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        container_image="py:3.11", memory_limit_mb=512, pids_limit=64, job="audited",
        labels={"task": "t-17"}, **more,
    )  # fmt: skip


async def collect(guard: DSecClient, into: list[Any]) -> None:
    async for finding in guard.audit.findings():
        into.append(finding)


async def test_a_fork_bomb_and_an_output_flood_are_found_and_a_test_run_is_not(
    containers: DSecClient, guard: DSecClient
) -> None:
    told: list[Any] = []
    hearing = asyncio.create_task(collect(guard, told))
    await asyncio.sleep(0.2)
    await guard._core.link.flush(SETTLE_S)
    async with (
        await containers.run_container(args()) as bad,
        await containers.run_container(args()) as good,
    ):
        await asyncio.gather(
            bad.exec("python3", "-c", FORKS, timeout=60),
            good.exec(SUITE, timeout=60),
        )
        flood = await bad.exec(FLOOD, timeout=60)
        assert sum(flood.truncated) > 64 << 20

        async def found() -> dict[str, Any] | None:
            mine = {f.rule: f for f in told if f.uid == bad.uid}
            return mine if {"fork_bomb", "output_flood"} <= mine.keys() else None

        mine = await until(found, what="both findings")
        await _is_whole(containers, guard, bad, mine)
        entries = [e async for e in guard.audit.list(target=good.uid, kind="finding")]
        assert entries == []
        assert [f for f in told if f.uid == good.uid] == []
    hearing.cancel()


async def _is_whole(
    trainer: DSecClient, guard: DSecClient, bad: Sandbox, found: dict[str, Any]
) -> None:
    """Rule, sandbox, job, task, principal; evidence; explanation; export; chain."""
    bomb = found["fork_bomb"]
    assert (bomb.severity, bomb.job, bomb.task) == ("high", "audited", "t-17")
    assert bomb.principal == trainer.principal
    assert bomb.project == trainer.project
    assert bomb.count >= 100
    assert found["output_flood"].count >= 64 << 20
    explained = await guard.audit.explain(bomb.id)
    assert explained.rule is not None
    assert explained.rule.id == "fork_bomb"
    refused = sum(e.record["count"] for e in explained.evidence)
    assert refused >= bomb.count
    assert {e.record["uid"] for e in explained.evidence} == {bad.uid}
    entry = [e async for e in guard.audit.list(target=bad.uid, kind="finding", verb="fork_bomb")]
    event = json.loads(json.dumps(ocsf_event(entry[0])))
    assert (event["class_uid"], event["severity_id"]) == (FINDING, 4)
    assert event["finding_info"]["uid"] == bomb.id
    chain: Chain = await guard.audit.verify()
    assert chain.intact
    suggested = await guard.audit.suggest(uid=bad.uid)
    assert "resources.pids" in {s.path for s in suggested.suggestions}


async def test_the_security_key_can_do_nothing_but_look(guard: DSecClient) -> None:
    for call in (
        lambda: guard.run_container(args(), timeout=60),
        lambda: guard.keys.list(),
        lambda: guard.audit.report("0" * 26, [GradingObservation(what="process_alive",
                                                                 subject="x")]),
    ):  # fmt: skip
        with pytest.raises((Forbidden, DSecError)) as caught:
            await call()
        assert caught.value.code == "forbidden"


@pytest.mark.parametrize(
    ("what", "state", "cause"),
    [("test_file_edited", "stopped", "policy_violation"), ("process_alive", "paused", None)],
)
async def test_a_response_is_carried_out_and_recorded_under_audits_name(
    fake_system: LocalSystem, client: DSecClient, what: Any, state: str, cause: str | None
) -> None:
    project = (await client.projects.create(f"strict-{state}")).id
    async with open_client(fake_system, project=project) as trainer:
        box = await trainer.create(DSecRunArgs(backend="fake", memory_limit_mb=16), timeout=60)
        seen = [GradingObservation(what=what, subject="x")]
        await trainer.audit.report(box.uid, seen)

        async def answered() -> Any:
            info = await box.info()
            return info if info.state == state else None

        info = await until(answered, what=f"a sandbox that is {state}")
        assert info.cause == cause

        async def recorded() -> Any:
            return [e async for e in trainer.audit.list(kind="access", principal="audit")]

        (entry,) = await until(recorded, what="audit's own request")
        assert (entry.record["target"], entry.record["outcome"]) == (box.uid, "ok")


async def test_a_full_disk_is_found_where_disks_are_limited(client: DSecClient) -> None:
    args = DSecRunArgs(backend="fake", memory_limit_mb=16, disk_limit_mb=1)
    async with await client.create(args, timeout=60) as box:
        await box.files.write("/half", b"x" * 500_000)
        await asyncio.sleep(2.5)
        assert [e async for e in client.audit.list(kind="finding", target=box.uid)] == []
        await box.files.write("/rest", b"x" * 540_000)

        async def found() -> Any:
            return [e async for e in client.audit.list(kind="finding", target=box.uid)]

        (entry,) = await until(found, what="a finding")
        assert entry.record["rule"] == "disk_fill"


async def test_a_quarantined_sandbox_stands_still_and_its_disk_is_kept(
    container_system: LocalSystem, containers: DSecClient
) -> None:
    project = (await containers.projects.create("strict-kept")).id
    async with (
        open_client(container_system, project=project) as trainer,
        await trainer.run_container(args()) as box,
    ):
        await box.files.write("/tmp/evidence", b"of it")
        known = {image.name for image in await trainer.images.list()}  # of projects above
        seen = [GradingObservation(what="protected_file_edited", subject="conftest.py")]
        await trainer.audit.report(box.uid, seen)

        async def kept() -> Any:
            paused = (await box.info()).state == "paused"
            images = await trainer.images.list()
            new = [i for i in images if i.kind == "snapshot" and i.name not in known]
            return new if paused else None

        (image,) = await until(kept, what="a paused sandbox and its snapshot")
        found = [e async for e in trainer.audit.list(kind="finding", target=box.uid)]
        assert found[0].record["snapshot"] == image.name.partition(":")[0]
