"""The rollouts: groups of sandboxes, a scripted agent, tests brought in, rewards.

Half of each group gets the real fix (its reward must be 1), half does nothing (0). A
rollout that the infrastructure failed has no reward, never 0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePosixPath

from demo.grading import grade
from demo.results import Rollout
from demo.tasks import REPORT_PATH, Task
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import DSecError

BASE = "demo-base:1"
GROUP = 8
WORKSPACE = PurePosixPath("/workspace")
TEST_TIMEOUT_S = 300.0
CREATE_TIMEOUT_S = 120.0
TESTS_AT_ONCE = 2
"""Test runs are pure CPU: more at once than cores only lengthens each."""


def workspace_image(task: Task) -> str:
    """The name of a task's workspace layer."""
    return f"demo-{task.name}:1"


class Counted:
    """A sandbox whose calls are counted."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.execs = 0

    async def run(self, *argv: str, timeout: float = 60.0) -> None:
        """Runs a command that has to succeed."""
        self.execs += 1
        await self.sandbox.exec(*argv, timeout=timeout, check=True)


async def run_group(
    client: DSecClient, task: Task, tests: asyncio.Semaphore, done: Callable[[], None]
) -> list[Rollout]:
    """One group: created in one batch, run side by side, stopped."""
    args = DSecContainerRunArgs(
        layers=[BASE, workspace_image(task)],
        workdir=str(WORKSPACE),
        cpu_cores_limit=1,
        memory_limit_mb=1024,
        ttl_running_stop=600,
        network_rules={"pypi": False, "npm": False},
        labels={"demo": task.name},
    )
    made = await client.create_many(args, n=GROUP, timeout=CREATE_TIMEOUT_S)
    rollouts = [
        _one(result, task, number < GROUP // 2, tests, done)
        for number, result in enumerate(made)
    ]
    return list(await asyncio.gather(*rollouts))


async def _one(
    result: Sandbox | DSecError,
    task: Task,
    oracle: bool,
    tests: asyncio.Semaphore,
    done: Callable[[], None],
) -> Rollout:
    if isinstance(result, DSecError):
        done()
        return Rollout(task.name, oracle, math.nan, 0, None, f"create: {result}")
    counted = Counted(result)
    reward, problem, create_ms = None, "", math.nan
    try:
        async with result:
            create_ms = await _create_ms(result)
            if oracle:
                await _scripted_agent(counted, task)
            async with tests:
                reward = await _verify(counted, task)
    except DSecError as error:
        problem = f"{type(error).__name__}: {error}"
    done()
    return Rollout(task.name, oracle, create_ms, counted.execs, reward, problem)


async def _create_ms(sandbox: Sandbox) -> float:
    """From the admitted request to the running sandbox, each of a batch by itself."""
    info = await sandbox.info()
    return (info.changed_at - info.created_at) * 1e3


async def _scripted_agent(counted: Counted, task: Task) -> None:
    sandbox = counted.sandbox
    await counted.run("ls", "-la", str(WORKSPACE))
    for path, content in task.fix.items():
        target = str(WORKSPACE / path)
        if content is None:
            await counted.run("rm", target)
            continue
        if await sandbox.files.exists(target):
            await sandbox.files.read(target)
        await sandbox.files.write(target, content)
    changed = [path for path, content in task.fix.items() if content and path.endswith(".py")]
    await counted.run("python3", "-m", "py_compile", *changed)


async def _verify(counted: Counted, task: Task) -> float:
    """Brings the tests in now, not before, runs them and grades their report."""
    sandbox = counted.sandbox
    await counted.run("rm", "-rf", str(WORKSPACE / task.tests_dir), REPORT_PATH)
    await _bring_in(sandbox.files.write, task)
    counted.execs += 1
    await sandbox.exec(task.test_command, timeout=TEST_TIMEOUT_S)
    try:
        report = await sandbox.files.read(REPORT_PATH)
    except FileNotFoundError:
        report = b""  # the tests never ended well enough to write one: no test passed
    found = grade(report, fail_to_pass=task.fail_to_pass, pass_to_pass=task.pass_to_pass)
    return found.reward


async def _bring_in(write: Callable[[str, bytes], Awaitable[object]], task: Task) -> None:
    limit = asyncio.Semaphore(8)

    async def one(path: str, content: bytes) -> None:
        async with limit:
            await write(str(WORKSPACE / path), content)

    await asyncio.gather(*(one(path, content) for path, content in task.tests.items()))


async def run_all(
    client: DSecClient, tasks: Sequence[Task], done: Callable[[], None]
) -> list[Rollout]:
    """All groups, one batch a task, side by side."""
    tests = asyncio.Semaphore(TESTS_AT_ONCE)
    groups = await asyncio.gather(*(run_group(client, task, tests, done) for task in tasks))
    return [rollout for group in groups for rollout in group]
