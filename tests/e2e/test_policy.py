"""Policies from the SDK to the kernel, through the whole system."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.audit import GradingObservation
from libdsec.errors import DSecError, InvalidRequest, NotFound, Unsupported
from services.local import LocalSystem
from tests.e2e.conftest import open_client, until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

POLICY = {
    "preset": "locked", "files": {"hidden": ["/etc/passwd"]}, "resources": {"open_files": 256},
    "require": ["files.hidden", "processes"],
    "stages": {"open": {"network": {"203.0.113.0/24": True}}},
}  # fmt: skip
CONNECT = """python3 - <<'EOF'
import errno, socket
try: socket.create_connection(("203.0.113.1", 81), 0.2)
except OSError as e: print(errno.errorcode.get(e.errno, type(e).__name__))
EOF"""


def args(**changes: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image="py:3.11", memory_limit_mb=256, **changes)


async def test_a_policy_is_enforced_changed_and_shown(containers: DSecClient) -> None:
    """Also on a paused sandbox, which a change does not wake."""
    sandbox = await containers.run_container(args(policy=POLICY, network_rules={"pypi": False}))
    try:
        shown = (await sandbox.info()).enforcement
        assert shown["network"] == "none (no interface)"
        assert {shown["files.read_only"], shown["files.hidden"]} == {"mounts"}
        assert (await sandbox.exec("cat", "/etc/passwd")).text == ""
        assert (await sandbox.exec("touch", "/usr/bin/x")).exit_code == 1
        assert (await sandbox.run_shell("ulimit -n")).text == "256\n"
        assert (await sandbox.exec(CONNECT)).text == "ENETUNREACH\n"
        told = await sandbox.set_stage("open")
        assert told["network.203.0.113.0/24"] == "cgroup-BPF, gate"
        assert (await sandbox.info()).enforcement["network"] == "cgroup-BPF, gate"
        await sandbox.set_network({"203.0.113.1:81": False})
        assert (await sandbox.exec(CONNECT)).text == "EPERM\n"
        await sandbox.pause()
        told = await sandbox.set_stage("")
        assert told["network"] == "none (no interface)"
        assert (await sandbox.info()).state == "paused"
        assert (await sandbox.exec(CONNECT)).text == "ENETUNREACH\n"
    finally:
        await sandbox.stop()


async def test_a_named_policy_is_enforced_and_changed_by_name(containers: DSecClient) -> None:
    shut = await containers.policies.create("shut", {"files": {"hidden": ["/etc/passwd"]}})
    opens = {**shut.document, "network": {"203.0.113.1:81": False, "203.0.113.0/24": True}}
    made = await containers.policies.create("shut", opens)
    assert (made.version, (await containers.policies.get("shut:1")).document) == (2, shut.document)
    sandbox = await containers.run_container(args(policy="shut:1"))
    try:
        assert (await sandbox.exec("cat", "/etc/passwd")).text == ""
        assert (await sandbox.exec(CONNECT)).text == "ENETUNREACH\n"
        await sandbox.set_policy("shut")
        assert (await sandbox.exec(CONNECT)).text == "EPERM\n"
        with pytest.raises(NotFound):
            await sandbox.set_policy("none")
    finally:
        await sandbox.stop()
    listed = [p.name for p in await containers.policies.list()]
    assert listed == ["shut", "locked", "research", "build"]
    await containers.policies.delete("shut")


FLOW = """exec python3 -u - <<'EOF'
import socket
flow = socket.create_connection(("api.test", 8081), 30)
flow.sendall(b"GET / HTTP/1.1\\r\\nHost: api.test\\r\\n\\r\\n")
print("open", flow.recv(4096)[:15].decode())
flow.settimeout(120)
try: print("over", flow.recv(4096))
except ConnectionResetError: print("over reset")
EOF"""
REACH = """python3 - <<'EOF'
import socket
try: socket.create_connection(("api.test", 8081), 30); print("reached")
except OSError as e: print("not reached")
EOF"""
SHUT = "none (no interface)"


async def test_a_finding_makes_a_running_sandbox_stricter(
    containers: DSecClient, container_system: LocalSystem
) -> None:
    """What is open is reset, its trainer cannot open it again, and neither can a new edge."""
    project = (await containers.projects.create("tight")).id
    async with open_client(container_system, project=project) as trainer:
        sandbox = await trainer.run_container(args(network_rules={"api.test:8081": True}))
        flow = await sandbox.spawn(FLOW)
        lines = flow.stdout.__aiter__()
        assert b"open HTTP/1.1 200" in await asyncio.wait_for(anext(lines), 60)
        seen = [GradingObservation(what="test_file_edited", subject="x")]
        await trainer.audit.report(sandbox.uid, seen)

        async def network() -> bool:
            return (await sandbox.info()).enforcement["network"] == SHUT

        await until(network, within_s=60, what="no way out")
        assert b"over reset" in await asyncio.wait_for(anext(lines), 60)
        assert (await sandbox.exec(REACH)).text == "not reached\n"
        told = await sandbox.set_network({"api.test:8081": True})
        assert told["network"] == SHUT
        edge = next(name for name in container_system.services if name.startswith("edge"))
        await container_system.kill(edge)
        await container_system.restart(edge)
        assert (await sandbox.exec(REACH)).text == "not reached\n"
        [branch] = await sandbox.fork(1)
        restored = await trainer.restore(await sandbox.snapshot())
        for one in (branch, restored):
            assert (await one.exec(REACH)).text == "not reached\n"
            told = await one.set_network({"api.test:8081": True})
            assert told["network"] == SHUT
        found = [e async for e in trainer.audit.list(kind="finding", target=sandbox.uid)]
        assert found[0].record["response"] == "tighten"
        assert found[0].record["tighten"] == {"network": ["*"]}
        await sandbox.stop()


async def test_what_continues_a_sandbox_is_under_the_policy_that_is_in_force(
    containers: DSecClient,
) -> None:
    rules = {"203.0.113.0/24": True}
    async with await containers.run_container(args(network_rules=rules)) as sandbox:
        await sandbox.set_network({**rules, "203.0.113.1:81": False})
        [branch] = await sandbox.fork(1)
        restored = await containers.restore(await sandbox.snapshot())
        for one in (branch, restored):
            assert (await one.exec(CONNECT)).text == "EPERM\n"
            assert (await one.info()).enforcement == (await sandbox.info()).enforcement
        await containers.stop_many([branch, restored])


async def test_what_cannot_be_is_refused_by_name(containers: DSecClient) -> None:
    for policy, kind, field in (
        ({"filez": {}}, Unsupported, "policy.filez"),
        ({"processes": {"deny": ["ptrce"]}}, Unsupported, "policy.processes.deny[0]"),
        ({"resources": {"inodes": 100}}, InvalidRequest, "policy.resources.inodes"),
        ({"files": {"protected": ["/no/such"]}}, InvalidRequest, "policy.files"),
    ):
        with pytest.raises(kind) as caught:
            await containers.run_container(args(policy=policy))
        assert caught.value.field == field
    sandbox = await containers.run_container(args(policy=POLICY))
    try:
        for change, field in (
            (sandbox.set_stage("closed"), "stage"),
            (sandbox.set_network({"127.0.0.1": True}), "network_rules.127.0.0.1"),
            (sandbox.set_policy({}), "policy.require"),  # what was required stays so
        ):
            with pytest.raises(DSecError) as refused:
                await change
            assert refused.value.field == field
        assert (await sandbox.info()).enforcement["files.hidden"] == "mounts"
    finally:
        await sandbox.stop()


async def test_a_denial_is_in_the_record_with_its_process(containers: DSecClient) -> None:
    rules = {"203.0.113.1:81": False, "*": True}
    sandbox = await containers.run_container(args(network_rules=rules))
    try:
        assert (await sandbox.exec(CONNECT)).text == "EPERM\n"

        async def told() -> list[Any]:
            listed = containers.audit.list(target=sandbox.uid, kind="violation")
            return [entry.record async for entry in listed]

        denied = await until(told, what="the denial in the record")
        assert denied[0]["rule"] == "network.203.0.113.1:81"
        assert denied[0]["actor"]["comm"] == "python3"
        assert denied[0]["destination"]["address"] == "203.0.113.1"
    finally:
        await sandbox.stop()
