"""Verdicts: what an agent's work is worth, judged where the agent cannot reach.

Owns: the step from an agent's sandbox to a reward, and the check that a task can be
solved and is not solved already. Does not own: what a good test is.

The agent's workspace travels as a git patch into a fresh sandbox of the same layers:
its processes, packages, planted files outside of the workspace, and whatever it did to
its own tools stay behind. Tests come in only then, over whatever lies in their place.
Where there is no repository, the work is judged in place: by another user, after the node
killed everything that the agent left running, without a network, and with nobody else let
in. Meanwhile a lease holds off the sandbox's own end. With a client, what still ran and
which files of the tests the agent had changed is told to audit.
"""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libdsec import counting
from libdsec.args import DSecContainerRunArgs, Seconds, seconds
from libdsec.client import DSecClient
from libdsec.errors import (
    DSecError,
    FileError,
    InvalidRequest,
    QuotaExceeded,
    SandboxDied,
    Unsupported,
)
from libdsec.observing import edited_files, processes_alive, tell
from libdsec.results import ExecResult
from libdsec.sandbox import Sandbox
from libdsec.verifying import Verifying

__all__ = [
    "PROTECTED", "VERIFIER", "Evidence", "Grade", "Preflight", "Task", "grade", "passed",
    "preflight",
]  # fmt: skip

PROTECTED = (
    "conftest.py", "**/conftest.py", "sitecustomize.py", "**/sitecustomize.py",
    "usercustomize.py", "**/usercustomize.py", "*.pth", "**/*.pth", "pytest.ini",
)  # fmt: skip
"""Files that change how tests run, in git's patterns: never taken from the agent."""
CREATE_S = 120.0
STEP_S = 120.0
TEST_S = 600.0
VERIFIER = "61007:61007"
"""Whose tests run in place: nobody's, so that what an agent owns or left is not theirs."""
OUT_OF_TIME = frozenset({"deadline", "idle_timeout"})
PLACE = "/run/dsec-verify"
"""Where the tests' report is written: a directory made for each verdict, which no other
user may enter."""


@dataclass(frozen=True)
class Evidence:
    """What a run of the tests left: its result and the report, if one was written."""

    result: ExecResult
    report: bytes | None = None


def passed(evidence: Evidence) -> float:
    """1.0 where the command ended with 0, else 0.0. Code under test that runs inside the
    test's own process can forge an exit code: judge a report by name where that matters."""
    return 1.0 if evidence.result.exit_code == 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be solved, and how that is found out.

    ``container_image`` or ``layers`` as in the run arguments; the agent's work lies in
    ``workdir``. ``tests`` maps paths (relative to ``workdir``, or absolute) to contents
    that come in at the verdict only; ``clear`` names directories that are emptied
    before. ``command`` is a shell line for ``workdir``, run for at most ``timeout_s``
    seconds as ``user`` (``None``: root in a fresh sandbox; in place a user who owns nothing
    there, and for whom ``workdir`` is made readable). ``$DSEC_REPORT`` names the file for
    its report, ``judge`` makes a reward of both. ``solution`` is a shell script, or
    contents by path with ``None`` for a file to be removed. ``protected``: patterns of
    files that are never taken from the agent. ``args``: further run arguments of the
    sandboxes made here.
    """

    command: str
    container_image: str | None = None
    layers: Sequence[str] = ()
    tests: Mapping[str, bytes | str] = field(default_factory=dict)
    clear: Sequence[str] = ()
    solution: str | Mapping[str, bytes | str | None] | None = None
    workdir: str = "/workspace"
    user: str | None = None
    timeout_s: Seconds = TEST_S
    judge: Callable[[Evidence], float] = passed
    protected: Sequence[str] = PROTECTED
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidRequest("a task needs a command", field="command")
        if not posixpath.isabs(self.workdir):
            raise InvalidRequest("an absolute path", field="workdir")
        if (self.container_image is None) == (not self.layers):
            raise InvalidRequest("name either container_image or layers", field="layers")
        if not (seconds(self.timeout_s, "timeout_s") or 0.0) > 0:
            raise InvalidRequest("tests need time", field="timeout_s")
        for path in (*self.tests, *self.clear):
            if ".." in path.split("/"):
                raise InvalidRequest(f"{path!r} leaves the workspace", field="tests")

    def run_args(self) -> DSecContainerRunArgs:
        """Arguments of a sandbox of this task: without any network, unless ``args`` say
        otherwise."""
        given = {"layers": list(self.layers) or None, "workdir": self.workdir, **self.args}
        return DSecContainerRunArgs(container_image=self.container_image, **given)

    def path(self, name: str) -> str:
        """Where a file of the task lies."""
        return posixpath.normpath(posixpath.join(self.workdir, name))


@dataclass(frozen=True)
class Grade:
    """``reward`` is ``None`` exactly where the infrastructure failed (``is_infra``): such
    a sample says nothing about the policy. ``cause`` is why there is no full verdict;
    ``details``: ``fresh`` (judged in a sandbox of its own), ``exit_code``, ``output`` (the
    end of what the tests wrote), ``message``."""

    reward: float | None
    is_infra: bool = False
    cause: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preflight:
    """Whether a task is one: ``oracle`` is the grade with its solution, ``noop`` that of
    doing nothing; ``ok`` where they are 1 and 0."""

    ok: bool
    oracle: Grade
    noop: Grade


async def grade(sandbox: Sandbox, task: Task, *, client: DSecClient | None = None) -> Grade:
    """The verdict on the agent's work in ``sandbox``, which should not be used any more:
    nothing runs in it afterwards, and what was judged in place reaches no network.

    With a ``client`` it is judged in a fresh sandbox made by it, where the workspace is a
    git repository; else in place, which cannot undo what the agent did to the image's own
    tools. A lease (:meth:`Sandbox.verifying`) keeps the sandbox meanwhile, also one whose
    time is up within its ``scoring_grace_s``. Errors of the infrastructure are a grade
    without a reward; a sandbox that the agent brought down is a reward of 0. Raises for
    mistakes of the task: an image that is not there, a user that is unknown.
    """
    found = await _verdict(sandbox, task, client)
    if found.is_infra:
        counting.count("masked", "verdict")
    return found


async def _verdict(sandbox: Sandbox, task: Task, client: DSecClient | None) -> Grade:
    held: Verifying | None = None
    try:
        async with sandbox.verifying() as held:
            if client is not None:
                return await _fresh(held, task, client)
            return await _in_place(held, task)
    except DSecError as exc:
        if held is not None and isinstance(exc, SandboxDied) and exc.cause in OUT_OF_TIME:
            text = f"the sandbox ended while it was judged: {exc}"
            return Grade(None, is_infra=True, cause=exc.cause, details={"message": text})
        return _without_verdict(exc)


def _without_verdict(exc: DSecError) -> Grade:
    """Masked, or 0 where the agent's own sandbox came to grief. Raises what is neither:
    a mistake in the task."""
    cause, details = exc.cause or exc.code, {"message": str(exc)}
    if exc.is_infra or isinstance(exc, QuotaExceeded):
        return Grade(None, is_infra=True, cause=cause, details=details)
    if isinstance(exc, SandboxDied):
        return Grade(0.0, cause=cause, details=details)
    raise exc


async def _fresh(sandbox: Verifying, task: Task, client: DSecClient) -> Grade:
    seen = await processes_alive(sandbox)
    await sandbox.alone()
    args = task.run_args()
    if args.job is None:  # who dies here leaves it to the job, like the agent's sandbox
        args.job = sandbox.job
    async with await client.run_container(args, timeout=CREATE_S) as clean:
        base = await _base(clean, task)
        if base is None:
            await tell(client, sandbox, seen)
            return await _in_place(sandbox, task)
        try:
            patch = await sandbox.files.diff(task.workdir, base=base)
        except (FileError, InvalidRequest, Unsupported) as exc:
            text = f"the agent left no repository to compare: {exc}"
            await tell(client, sandbox, seen)
            return Grade(0.0, cause="no_diff", details={"message": text})
        seen += edited_files(patch, tests=task.tests, protected=task.protected)
        await tell(client, sandbox, seen)
        if patch and not await _apply(clean, task, patch):
            return Grade(0.0, cause="no_diff", details={"message": "the patch does not apply"})
        return await _judge(clean, task, fresh=True)


async def _base(clean: Sandbox, task: Task) -> str | None:
    """The commit that the agent began with, ``None`` where there is none."""
    found = await clean.exec(
        "git", "-c", "safe.directory=*", "rev-parse", "-q", "--verify", "HEAD",
        cwd=task.workdir, user="root", timeout=STEP_S,
    )  # fmt: skip
    return found.text.strip() if found.ok else None


async def _apply(clean: Sandbox, task: Task, patch: bytes) -> bool:
    excludes = [f"--exclude={pattern}" for pattern in task.protected]
    applied = await clean.exec(
        "git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn", *excludes, "-",
        cwd=task.workdir, user="root", stdin=patch, timeout=STEP_S,
    )  # fmt: skip
    return applied.ok


async def _in_place(sandbox: Verifying, task: Task) -> Grade:
    await sandbox.alone(offline=True)
    return await _judge(sandbox, task, fresh=False)


PREPARE = """
umask 077; mkdir "$1" && chown "$2" "$1" || exit 1
[ "$2" = "$4" ] && chmod -R a+rX -- "$3"
shift 4; rm -rf -- "$@"
"""


async def _judge(sandbox: Sandbox, task: Task, *, fresh: bool) -> Grade:
    """Brings the tests in, runs them, and takes the verdict."""
    place = f"{PLACE}-{secrets.token_hex(8)}"
    user = task.user or ("root" if fresh else VERIFIER)
    owner = user if user == VERIFIER else user.partition(":")[0]
    cleared = [task.path(name) for name in task.clear]
    made = await sandbox.exec(
        "sh", "-c", PREPARE, "verify", place, owner, task.workdir, VERIFIER, *cleared,
        cwd="/", user="root", timeout=STEP_S,
    )  # fmt: skip
    if not made.ok:
        raise Unsupported(f"the image cannot hold a verdict: {made.stderr.decode()[-500:]}")
    for name, content in task.tests.items():
        await sandbox.files.write(task.path(name), content, user="root")
    report = posixpath.join(place, "report")
    home = {"HOME": place} if user == VERIFIER else {}
    result = await sandbox.exec(
        task.command, cwd=task.workdir, user=user, env={"DSEC_REPORT": report, **home},
        timeout=task.timeout_s,
    )  # fmt: skip
    details = {"fresh": fresh, "exit_code": result.exit_code, "output": _tail(result)}
    if result.timed_out or result.oom_killed:
        return Grade(0.0, cause="deadline" if result.timed_out else "oom", details=details)
    try:
        written = await sandbox.files.read(report, user="root")
    except FileError:
        written = None
    return Grade(task.judge(Evidence(result, written)), details=details)


def _tail(result: ExecResult) -> str:
    return (result.stdout + result.stderr).decode(errors="replace")[-4000:]


async def preflight(client: DSecClient, task: Task) -> Preflight:
    """Whether ``task`` can be solved and is not solved already: grades its solution and
    an untouched sandbox, the way an agent's work is graded."""
    if task.solution is None:
        raise InvalidRequest("a preflight needs the task's solution", field="solution")
    oracle = await _graded(client, task, solve=True)
    noop = await _graded(client, task, solve=False)
    return Preflight(oracle.reward == 1.0 and noop.reward == 0.0, oracle, noop)


async def _graded(client: DSecClient, task: Task, *, solve: bool) -> Grade:
    try:
        async with await client.run_container(task.run_args(), timeout=CREATE_S) as sandbox:
            if solve:
                await _solve(sandbox, task)
            return await grade(sandbox, task, client=client)
    except DSecError as exc:
        return _without_verdict(exc)


async def _solve(sandbox: Sandbox, task: Task) -> None:
    solution = task.solution
    if isinstance(solution, str):
        await sandbox.exec(solution, cwd=task.workdir, user="root", timeout=STEP_S, check=True)
        return
    for name, content in (solution or {}).items():
        if content is None:
            await sandbox.files.remove(task.path(name), user="root")
        else:
            await sandbox.files.write(task.path(name), content, user="root")
