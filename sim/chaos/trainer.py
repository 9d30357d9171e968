"""The process that is killed: it drives the rollouts of one batch, as one job.

Started with a plan on its standard input; the key comes in the environment. It tells
what happens on standard output, a JSON object a line, and keeps finished rollouts in a
file, as trainers do. It has no other memory: started again, it makes every call from the
first one on, through ``fast_forward``, which answers from the sandbox's log; its model's words
too, which are others each time that it is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from libdsec import DSecClient, ExecResult, Sandbox
from libdsec.errors import DSecError
from libdsec.forward import FastForward
from libdsec.jobs import Job
from libdsec.verify import grade
from sim.chaos import script
from sim.chaos.tasks import Exercise, exercises
from sim.chaos.trace import MUTATING, Batch, Group, Rollout, Step

CREATE_S = 180.0
COMMAND_S = 300.0
PATIENCE_S = 180.0
"""How long a call that may be repeated is repeated."""
AGAIN_S = 0.5
GRADES = 5
"""Tries of a verdict that the infrastructure failed."""
GRADES_AT_ONCE = 2
WORKSPACE = "/workspace"

T = TypeVar("T")


class Plan(msgspec.Struct, frozen=True):
    """What a trainer is to do. ``results``: the file of finished rollouts."""

    url: str
    project: str
    job: str
    lease_s: float
    results: str
    batch: Batch


def tell(event: str, **facts: Any) -> None:
    """One line for whoever started us."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


async def patiently(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a call that may be repeated, as its errors say, or say when."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await call()
        except DSecError as exc:
            if not (exc.retryable or exc.retry_after_s) or time.monotonic() > end:
                raise
            tell("retry", what=what, error=f"{type(exc).__name__}: {exc}")
            await asyncio.sleep(exc.retry_after_s or AGAIN_S)


class Trainer:
    """One life of the trainer of a batch."""

    def __init__(self, client: DSecClient, plan: Plan) -> None:
        self._client = client
        self._plan = plan
        self._tasks = exercises(group.task for group in plan.batch.groups)
        self._grading = asyncio.Semaphore(GRADES_AT_ONCE)
        self._results = Path(plan.results)

    def _finished(self) -> set[str]:
        if not self._results.exists():
            return set()
        lines = self._results.read_text().splitlines(keepends=True)
        return {json.loads(line)["name"] for line in lines if line.endswith("\n")}

    async def run(self) -> None:
        """All rollouts that are not finished yet, then the end of the job."""
        job = self._client.job(self._plan.job, lease_s=self._plan.lease_s)
        await patiently("open", job.open)
        try:
            finished = self._finished()
            groups = [self._group(job, group, finished) for group in self._plan.batch.groups]
            await asyncio.gather(*groups)
            await patiently("stop", job.stop)
        finally:
            await job.close()

    async def _group(self, job: Job, group: Group, finished: set[str]) -> None:
        if all(rollout.name in finished for rollout in group.rollouts):
            return
        args = self._tasks[group.task].task.run_args()
        start = time.perf_counter()
        key = group.rollouts[0].name
        made = await patiently(
            "create",
            lambda: job.create_many(args, n=len(group.rollouts), key=key, timeout=CREATE_S),
        )
        tell("made", ms=(time.perf_counter() - start) * 1e3, count=len(made))
        todo = [
            self._rollout(sandbox, self._tasks[group.task], rollout)
            for sandbox, rollout in zip(made, group.rollouts, strict=True)
            if rollout.name not in finished
        ]
        await asyncio.gather(*todo)

    async def _rollout(
        self, sandbox: Sandbox | DSecError, exercise: Exercise, rollout: Rollout
    ) -> None:
        try:
            if isinstance(sandbox, DSecError):
                raise sandbox
            await Agent(sandbox, exercise, rollout).work()
            found = await self._judged(sandbox, exercise, rollout)
            self._keep(found)
            tell("rollout", **found)
            await patiently("stop", sandbox.stop)
        except DSecError as exc:
            tell("lost", name=rollout.name, error=f"{type(exc).__name__}: {exc}")

    async def _judged(
        self, sandbox: Sandbox, exercise: Exercise, rollout: Rollout
    ) -> dict[str, Any]:
        numbers = [int(line) for line in await _lines(sandbox, script.DIARY)]
        session = [int(line) for line in await _lines(sandbox, script.SESSION_DIARY)]
        wanted = [step.number for step in rollout.steps if step.kind in MUTATING]
        of_session = sum(step.kind == "session" for step in rollout.steps)
        reward, cause = await self._reward(sandbox, exercise)
        return {
            "name": rollout.name,
            "reward": reward,
            "cause": cause,
            "commands": len(wanted),
            "missing": sorted(set(wanted) - set(numbers)),
            "repeated": sorted({n for n in numbers if numbers.count(n) > 1}),
            "session_kept": session == list(range(1, of_session + 1)),
        }

    async def _reward(
        self, sandbox: Sandbox, exercise: Exercise
    ) -> tuple[float | None, str | None]:
        async with self._grading:
            for _ in range(GRADES):
                found = await grade(sandbox, exercise.task, client=self._client)
                if not found.is_infra:
                    break
                tell("masked", cause=found.cause, message=found.details.get("message"))
                await asyncio.sleep(AGAIN_S)
            return found.reward, found.cause

    def _keep(self, found: Mapping[str, Any]) -> None:
        with self._results.open("a") as file:
            file.write(json.dumps(found) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Agent:
    """The steps of one rollout, in one sandbox."""

    def __init__(self, sandbox: Sandbox, exercise: Exercise, rollout: Rollout) -> None:
        self._sandbox = sandbox
        self._exercise = exercise
        self._rollout = rollout
        self._steps = sandbox.fast_forward()

    async def work(self) -> None:
        """All steps, then what is handed in."""
        beside: list[asyncio.Task[None]] = []
        for step in self._rollout.steps:
            said = await self._said(step)
            if step.overlap:
                beside.append(asyncio.create_task(self._step(step, said)))
                continue
            await self._step(step, said)
            await asyncio.gather(*beside)
            beside.clear()
        for name, content in self._exercise.work(self._rollout.outcome).items():
            await self._hand_in(f"{WORKSPACE}/{name}", content)

    async def _hand_in(self, path: str, content: bytes | None) -> None:
        files = self._sandbox.files
        if content is not None:
            await patiently("write", lambda: files.write(path, content))
        elif await patiently("exists", lambda: files.exists(path)):
            await patiently("remove", lambda: files.remove(path))

    async def _said(self, step: Step) -> str:
        """What the model says before a step."""

        async def model(_number: int) -> str:
            await asyncio.sleep(step.think_s)
            return secrets.token_hex(8)

        lane = f"model:{step.number}"
        return await patiently("ask", lambda: self._steps.thread(lane).ask(step.number, model))

    async def _step(self, step: Step, said: str) -> None:
        facts: dict[str, Any] = {"name": self._rollout.name, "step": step.number}
        if step.drop:
            tell("long", seconds=step.seconds, **facts)
        start = time.perf_counter()
        result = await self._call(step, said)
        took_s = time.perf_counter() - start
        if result is not None:
            facts |= {"digest": _digest(result), "over_ms": (took_s - result.duration_s) * 1e3}
        tell("step", kind=step.kind, ms=took_s * 1e3, **facts)

    async def _call(self, step: Step, said: str) -> ExecResult | None:
        note = f"{WORKSPACE}/notes/{step.number}.md"
        match step.kind:
            case "exec" | "session":
                return await self._command(step, f": {said}; {script.command(step)}")
            case "grep":
                return await self._command(step, f": {said}; grep -rnc import /workspace | tail -5")
            case "read":
                some = f"{WORKSPACE}/{min(self._exercise.workspace)}"
                await patiently("read", lambda: self._at(step).files.read(some))
            case "glob":
                every = f"{WORKSPACE}/**/*.py"
                await patiently("glob", lambda: self._at(step).files.glob(every))
            case "edit" | "write":
                content = b"n" * step.size
                await patiently("write", lambda: self._at(step).files.write(note, content))
        return None

    async def _command(self, step: Step, line: str) -> ExecResult:
        timeout = step.seconds if step.work == "hang" else COMMAND_S

        async def run() -> ExecResult:
            at = self._at(step)
            call = at.run_shell if step.kind == "session" else at.exec
            return await call(line, timeout=timeout)

        return await patiently(step.kind, run)

    def _at(self, step: Step) -> FastForward:
        """Where the step's calls are counted: by themselves, as some overlap, and from the
        first one on, as some are made again."""
        return self._steps.thread(str(step.number))


def _digest(result: ExecResult) -> str:
    """What a step came to, for comparison: not how long it took. The second half is that
    of its output; there is none where a part of it was not kept and the result says so."""
    ended = repr((result.exit_code, result.timed_out, result.oom_killed)).encode()
    whole = not any(result.truncated)
    parts = [ended, *([result.stdout] if whole else [])]
    return "/".join(hashlib.sha256(part).hexdigest()[:12] for part in parts)


async def _lines(sandbox: Sandbox, path: str) -> list[str]:
    try:
        content = await patiently("read", lambda: sandbox.files.read(path))
    except FileNotFoundError:
        return []
    return content.decode().split()


async def run(plan: Plan) -> None:
    """One life of a trainer."""
    async with DSecClient(url=plan.url, project=plan.project) as client:
        await Trainer(client, plan).run()
    tell("over")


if __name__ == "__main__":
    asyncio.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)))
