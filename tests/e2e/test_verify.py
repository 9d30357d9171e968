"""Verdicts on real containers: what an agent may not bring into them, what is masked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from libdsec import (
    Conflict,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    InvalidRequest,
    Sandbox,
    SandboxDied,
)
from libdsec.verify import Evidence, Task, grade, preflight
from services.local import LocalSystem
from tests.e2e.conftest import open_client, until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

CHECK = 'import sys; sys.path.insert(0, "/workspace"); import calc; assert calc.add(2, 3) == 5\n'
LIMITS = {"memory_limit_mb": 256, "pids_limit": 64, "labels": {"suite": "verify"}}


def task(**changes: Any) -> Task:
    given: dict[str, Any] = {
        "layers": ["py:3.11", "verify-git:1"],
        "tests": {"checks/check_add.py": CHECK},
        "clear": ["checks"],
        "command": "python3 -B checks/check_add.py",
        "solution": {"calc.py": "def add(a, b):\n    return a + b\n"},
        "args": LIMITS,
    }
    return Task(**{**given, **changes})


BASE = """
mkdir -p /workspace && cd /workspace && printf 'def add(a, b):\\n    return a - b\\n' > calc.py &&
git init -q . && git add -A && git -c user.email=a@b -c user.name=a commit -qm base
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def workspaces(container_system: LocalSystem) -> None:
    """A workspace with a repository, and one without."""
    folder = Path(container_system.options.image_roots[1])
    async with open_client(container_system) as client:
        args = DSecContainerRunArgs(container_image="py:3.11", init_user="root", **LIMITS)
        async with await client.run_container(args) as sandbox:
            plain = "rm -rf /workspace/.git"
            for name, script in (("verify-git:1", BASE), ("verify-plain:1", plain)):
                await sandbox.exec(script, check=True)
                root = folder / name.partition(":")[0]
                await sandbox.files.download_tree("/workspace", root)
                await client.images.create(name, path=str(root), kind="workspace")


@pytest_asyncio.fixture(loop_scope="session")
async def agent(containers: DSecClient) -> AsyncIterator[Sandbox]:
    """An agent's sandbox, as root: the worst case."""
    async with await containers.run_container(task().run_args()) as sandbox:
        yield sandbox


async def test_a_good_task_scores_one_with_its_solution_and_nothing_without(
    containers: DSecClient,
) -> None:
    found = await preflight(containers, task())
    assert (found.ok, found.oracle.reward, found.noop.reward) == (True, 1.0, 0.0), found
    assert found.oracle.details["fresh"]


@pytest.mark.parametrize("solution", ["true", "sed -i s/-/+/ calc.py"])
async def test_a_solution_may_be_a_script(containers: DSecClient, solution: str) -> None:
    found = await preflight(containers, task(solution=solution))
    assert found.ok == (solution != "true")
    assert found.noop.reward == 0.0


async def test_nothing_of_the_tests_is_there_before_the_verdict(agent: Sandbox) -> None:
    """(S04)"""
    found = await agent.exec("find", "/", "-xdev", "-name", "check_add*", user="root")
    assert found.text == ""


@pytest.mark.parametrize(
    "plant",
    [
        "mkdir checks; echo 'raise SystemExit(0)' > checks/check_add.py",
        "echo 'import os; os._exit(0)' > sitecustomize.py",
        "d=$(python3 -c 'import site; print(site.getsitepackages()[0])'); mkdir -p $d;"
        "echo 'import os; os._exit(0)' > $d/usercustomize.py;"
        "echo 'import os; os._exit(0)' > $d/sitecustomize.py",
        "printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3",
        "nohup sh -c 'while :; do echo > checks/check_add.py; sleep 0.01; done' >/dev/null 2>&1 &",
        "git config core.fsmonitor 'exit 0'; git config alias.apply '!true'",
        "mkdir -p .git/hooks; git -c user.email=a@b -c user.name=a commit -qam mine || true",
    ],
    ids=["tests", "sitecustomize", "packages", "tools", "processes", "git", "commits"],
)
async def test_what_an_agent_planted_does_not_reach_the_verdict(
    containers: DSecClient, agent: Sandbox, plant: str
) -> None:
    """(S04)"""
    await agent.exec(plant, cwd="/workspace", check=True, timeout=60)
    found = await grade(agent, task(command="PYTHONPATH=/workspace python3 -B checks/check_add.py"),
                        client=containers)  # fmt: skip
    assert (found.reward, found.is_infra, found.details.get("fresh")) == (0.0, False, True), found


async def test_what_a_grader_saw_is_told_to_audit(containers: DSecClient, agent: Sandbox) -> None:
    work = (
        "mkdir checks; echo pass > checks/check_add.py; echo > conftest.py;"
        "nohup sleep 1000 >/dev/null 2>&1 &\n"
        'until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done'  # it is nohup at first
    )
    await agent.exec(work, cwd="/workspace", check=True)
    await grade(agent, task(), client=containers)
    async with await containers.run_container(task().run_args()) as honest:
        session = honest.session("left-open")
        await session.run("cd /workspace && sed -i s/-/+/ calc.py", check=True)
        assert (await grade(honest, task(), client=containers)).reward == 1.0

    async def found() -> dict[str, Any] | None:
        entries = [e async for e in containers.audit.list(kind="finding", target=agent.uid)]
        return {e.record["rule"]: e.record for e in entries} if len(entries) > 2 else None

    seen = await until(found, what="findings of the grader")
    assert seen.keys() == {"processes_at_grading", "test_file_edit", "protected_file_edit"}
    assert "sleep" in seen["processes_at_grading"]["explanation"]
    assert "checks/check_add.py" in seen["test_file_edit"]["explanation"]
    assert "conftest.py" in seen["protected_file_edit"]["explanation"]
    assert [e async for e in containers.audit.list(kind="finding", target=honest.uid)] == []


async def test_committed_work_counts_too(containers: DSecClient, agent: Sandbox) -> None:
    work = "sed -i s/-/+/ calc.py; git -c user.email=a@b -c user.name=a commit -qam fixed"
    await agent.exec(work, cwd="/workspace", check=True)
    assert (await grade(agent, task(), client=containers)).reward == 1.0


async def test_a_repository_that_is_gone_is_no_reward_and_no_fault_of_ours(
    containers: DSecClient, agent: Sandbox
) -> None:
    await agent.exec("rm", "-rf", "/workspace/.git", check=True)
    found = await grade(agent, task(), client=containers)
    assert (found.reward, found.is_infra, found.cause) == (0.0, False, "no_diff")


async def test_without_a_repository_the_verdict_is_taken_in_place_alone(
    containers: DSecClient,
) -> None:
    plain = task(layers=["py:3.11", "verify-plain:1"], user="nobody")
    async with await containers.run_container(plain.run_args()) as sandbox:
        forge = "while :; do echo 'raise SystemExit(0)' > /workspace/checks/check_add.py; done"
        await sandbox.exec(f"(setsid sh -c \"{forge}\" >/dev/null 2>&1 &)", check=True)
        found = await grade(sandbox, plain, client=containers)
        assert (found.reward, found.details["fresh"]) == (0.0, False)
        assert (await sandbox.exec("pgrep", "-f", "SystemExit")).text == ""
        await sandbox.files.write("/workspace/calc.py", "def add(a, b):\n    return a + b\n")
        assert (await grade(sandbox, plain, client=containers)).reward == 1.0


async def test_in_place_the_node_ends_what_ran_and_another_user_judges_offline(
    containers: DSecClient,
) -> None:
    """(S04) Also where the agent, as root, took the image's tools to kill with."""
    plain = task(
        layers=["py:3.11", "verify-plain:1"], args={**LIMITS, "network_rules": {"pypi": True}},
        command='test "$(id -u)" != 0 && ! touch calc.py 2>/dev/null && cat calc.py',
    )  # fmt: skip
    async with await containers.run_container(plain.run_args()) as sandbox:
        before = (await sandbox.info()).enforcement["network"]
        await sandbox.exec(
            "umask 077; echo hers > /workspace/calc.py; setsid sleep 1001 >/dev/null 2>&1 &"
            "mkdir -p /usr/local/bin; printf '#!/bin/sh\\n' > /usr/local/bin/kill;"
            "chmod +x /usr/local/bin/kill", check=True,
        )  # fmt: skip
        found = await grade(sandbox, plain)
        assert (found.reward, found.details["fresh"]) == (1.0, False), found
        assert found.details["output"] == "hers\n"
        assert (await sandbox.exec("pgrep", "-f", "sleep 1001")).text == ""
        after = (await sandbox.info()).enforcement["network"]
        assert before != after and after.startswith("none")


async def test_who_ran_out_of_time_is_scored_within_the_time_for_it(
    containers: DSecClient,
) -> None:
    for fresh in (True, False):
        args = replace(task().run_args(), scoring_grace_s=600)
        async with await containers.run_container(args) as sandbox:
            await sandbox.exec("sed -i s/-/+/ calc.py", cwd="/workspace", check=True)
            await sandbox.set_timeout(deadline_s=0.5)
            with pytest.raises(SandboxDied) as died:
                await sandbox.exec("sleep 600; sed -i s/+/-/ /workspace/calc.py", timeout=120)
            assert (died.value.cause, died.value.is_infra) == ("deadline", False)
            found = await grade(sandbox, task(), client=containers if fresh else None)
            assert (found.reward, found.details["fresh"]) == (1.0, fresh)


async def test_one_at_a_time_judges_and_nobody_is_let_in_beside(containers: DSecClient) -> None:
    async with await containers.run_container(task().run_args()) as sandbox:
        async with sandbox.verifying(lease_s=6) as held:
            with pytest.raises(Conflict):
                await grade(sandbox, task())
            await held.alone()
            with pytest.raises(Conflict):
                await sandbox.exec("true")
            assert (await held.exec("echo mine")).text == "mine\n"
        assert (await sandbox.exec("echo ours")).text == "ours\n"


async def test_a_verdict_waits_for_the_lease_of_a_verifier_that_died(
    containers: DSecClient, agent: Sandbox
) -> None:
    dead = agent.verifying(lease_s=12)
    await dead.__aenter__()
    await dead.alone()
    with pytest.raises(Conflict) as refused:
        await agent.exec("true")
    assert 0 < (refused.value.retry_after_s or 0) <= 12
    assert dead._task is not None
    dead._task.cancel()
    assert (await grade(agent, task(), client=containers)).reward is not None


async def test_a_report_is_judged_and_the_agent_cannot_write_it(
    containers: DSecClient, agent: Sandbox
) -> None:
    def judge(evidence: Evidence) -> float:
        assert evidence.report is not None
        return float(evidence.report)

    command = 'echo 0.25 > "$DSEC_REPORT"; ls -ld "$(dirname "$DSEC_REPORT")"'
    found = await grade(agent, task(command=command, judge=judge), client=containers)
    assert found.reward == 0.25
    assert found.details["output"].startswith("drwx------")


async def test_tests_that_take_too_long_or_too_much_are_no_reward(
    containers: DSecClient, agent: Sandbox
) -> None:
    slow = await grade(agent, task(command="sleep 60", timeout_s=1), client=containers)
    assert (slow.reward, slow.cause) == (0.0, "deadline")
    hungry = "python3 -c 'x = bytearray(1 << 30)'"
    big = await grade(agent, task(command=hungry), client=containers)
    assert (big.reward, big.cause) == (0.0, "oom")


async def test_a_failure_of_the_infrastructure_is_masked(
    containers: DSecClient, agent: Sandbox
) -> None:
    large = task(args={**LIMITS, "memory_limit_mb": 4_000_000})
    found = await grade(agent, large, client=containers)
    assert (found.reward, found.is_infra) == (None, True)
    assert found.cause


async def test_a_sandbox_that_its_agent_ended_is_a_reward_of_zero(containers: DSecClient) -> None:
    sandbox = await containers.run_container(task().run_args())
    await sandbox.stop()
    found = await grade(sandbox, task(), client=containers)
    assert (found.reward, found.is_infra) == (0.0, False)


async def test_mistakes_of_a_task_are_errors(containers: DSecClient, agent: Sandbox) -> None:
    with pytest.raises(InvalidRequest) as caught:
        task(tests={"../outside": "x"})
    assert caught.value.field == "tests"
    with pytest.raises(DSecError) as missing:
        await grade(agent, task(layers=["no-such-image:1"]), client=containers)
    assert missing.value.field
    with pytest.raises(InvalidRequest) as unsolved:
        await preflight(containers, task(solution=None))
    assert unsolved.value.field == "solution"


async def test_a_verdicts_sandbox_belongs_to_the_job_of_the_one_it_judges(
    containers: DSecClient,
) -> None:
    args = replace(task().run_args(), job="graded")
    async with await containers.run_container(args) as sandbox:
        assert (await grade(sandbox, task(), client=containers)).reward == 0.0
    assert len([s async for s in containers.list(job="graded")]) == 2
