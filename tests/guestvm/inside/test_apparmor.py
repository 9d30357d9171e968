"""AppArmor on containers of the driver: commands are put under a profile of their own, whose
denials hold, are told, and are found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from schemas.audit import Violation
from services.edge.drivers.base import Handle
from services.edge.machine import profiles
from shared import policies
from tests.conformance.harness import new_uid, run
from tests.guestvm.inside.harness import READY_S, guest_harness, say
from tests.integration.container.harness import ContainerHarness

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOLD_S = 60.0
POLICY = {
    "files": {"read_only": ["/bin"], "hidden": ["/etc/group"], "protected": ["/etc/passwd"]},
    "processes": {"deny": ["ptrace", "mount"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ContainerHarness]:
    async with guest_harness(tmp_path_factory.mktemp("container")) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told() -> list[Violation]:
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(harness: ContainerHarness, told: list[Violation]) -> AsyncIterator[Handle]:
    harness.driver.report_to(told.append)
    spec = harness.spec(uid=new_uid(), policy=policies.read(POLICY, {}))
    handle = await harness.driver.start(spec)
    yield handle
    await harness.driver.stop(handle)


async def test_the_node_says_that_profiles_are_applied(harness: ContainerHarness) -> None:
    report = await harness.driver.probe()
    assert report.features["policy_apparmor"].supported
    assert report.features["policy_apparmor"].reason == "AppArmor"


async def test_a_command_is_under_its_sandboxs_profile(
    harness: ContainerHarness, sandbox: Handle
) -> None:
    said = await say(harness, sandbox, "cat /proc/self/attr/current")
    assert said == f"{profiles.name_of(sandbox.uid)} (enforce)"
    assert sandbox.enforcement["files.read_only"] == "mounts, AppArmor, BPF LSM"


async def test_what_a_profile_denies_fails_and_is_told_with_its_rule(
    harness: ContainerHarness, sandbox: Handle, told: list[Violation]
) -> None:
    """Writes into what is mounted read-only fail before any profile is asked."""
    ways = {
        "cat /etc/group": "files.hidden",
        "mount -t tmpfs none /tmp": "processes.mount",
        "ls /root/../opt/answers": "files.hidden",
        "sysctl -w kernel.core_pattern=x": "",
    }  # fmt: skip
    for way, rule in ways.items():
        said = await say(harness, sandbox, f"{way} >/dev/null 2>&1 || echo refused")
        assert said == "refused", (way, rule)
    async with asyncio.timeout(TOLD_S):
        while "files.hidden" not in {v.rule for v in told if v.source == "apparmor"}:
            await asyncio.sleep(0.1)
    assert {v.uid for v in told} == {sandbox.uid}
    lines = [v.subject for v in told if v.rule == "files.hidden" and v.source == "apparmor"]
    assert all(profiles.name_of(sandbox.uid) in line for line in lines)


async def test_a_sandbox_without_a_policy_has_a_profile_too(harness: ContainerHarness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    try:
        said = await say(harness, handle, "cat /proc/self/attr/current; echo x >/bin/new && echo w")
        assert said.splitlines() == [f"{profiles.name_of(handle.uid)} (enforce)", "w"]
    finally:
        await harness.driver.stop(handle)
    listed = (profiles.KERNEL / "profiles").read_text()
    assert profiles.name_of(handle.uid) not in listed


async def test_who_stops_a_sandbox_may_signal_it(harness: ContainerHarness) -> None:
    """(S12)"""
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    said = asyncio.ensure_future(
        run(
            harness.driver, handle,
            "trap 'echo asked; exit 0' TERM; echo up >/tmp/up; while :; do sleep 0.2; done",
            timeout_s=300,
        )
    )  # fmt: skip
    async with asyncio.timeout(READY_S):
        while await say(harness, handle, "cat /tmp/up 2>/dev/null") != "up":
            await asyncio.sleep(0.2)
    await harness.driver.stop(handle, grace_s=60)
    done, _ = await asyncio.wait({said}, timeout=60)
    assert done and said.exception() is None and said.result().stdout == b"asked\n"


async def test_a_command_whose_profile_is_gone_does_not_run(harness: ContainerHarness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    try:
        profiles.remove(profiles.name_of(handle.uid))
        with pytest.raises(Exception, match="AppArmor"):
            await run(harness.driver, handle, "echo ran", timeout_s=60)
    finally:
        await harness.driver.stop(handle)
