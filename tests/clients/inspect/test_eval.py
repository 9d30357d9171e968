"""``inspect eval`` from end to end, as its users call it: another process, no network, a
mock model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log

from libdsec import DSecClient, Sandbox

HERE = Path(__file__).parent
INSPECT = Path(sys.executable).with_name("inspect")
RUN_S = 120


def environment(logs: Path) -> dict[str, str]:
    """The variables of an ``inspect`` command."""
    return os.environ | {"INSPECT_LOG_DIR": str(logs), "INSPECT_DISPLAY": "plain"}


def run(*argv: str, logs: Path) -> str:
    """Output of an ``inspect`` command that succeeds."""
    done = subprocess.run(
        [str(INSPECT), *argv], cwd=HERE, env=environment(logs), capture_output=True, text=True,
        timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def only_log(folder: Path) -> EvalLog:
    """The one log of a run."""
    (info,) = list_eval_logs(str(folder))
    return read_eval_log(info)


async def left() -> list[Sandbox]:
    """Sandboxes of evaluations that are alive."""
    over = {"stopped", "failed", "rejected", "lost"}
    async with DSecClient(keep=True) as client:
        found = client.list(labels={"inspect_ai": "sandbox"})
        return [sandbox async for sandbox in found if sandbox.state not in over]


async def nothing_is_left() -> None:
    """Returns once none is."""
    async with asyncio.timeout(RUN_S):
        while await left():
            await asyncio.sleep(0.2)


async def test_an_evaluation_scores_every_sample_and_leaves_nothing(tmp_path: Path) -> None:
    run("eval", "eval_task.py", "--epochs", "2", logs=tmp_path)
    log = only_log(tmp_path)
    assert log.status == "success", log.error
    assert log.samples is not None and log.results is not None
    assert [sample.error for sample in log.samples] == [None] * 8
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    await nothing_is_left()


async def test_kept_sandboxes_are_named_and_cleaned_up_by_the_command(tmp_path: Path) -> None:
    said = run("eval", "eval_task.py", "--limit", "2", "--no-sandbox-cleanup", logs=tmp_path)
    kept = await left()
    assert len(kept) == 2
    assert all(sandbox.id in said for sandbox in kept)
    run("sandbox", "cleanup", "dsec", kept[0].id, logs=tmp_path)
    assert [sandbox.uid for sandbox in await left()] == [kept[1].uid]
    run("sandbox", "cleanup", "dsec", logs=tmp_path)
    await nothing_is_left()


async def test_an_interrupted_evaluation_leaves_nothing(tmp_path: Path) -> None:
    argv = [str(INSPECT), "eval", "eval_task.py", "-T", "command=sleep 100"]
    child = await asyncio.create_subprocess_exec(
        *argv, cwd=HERE, env=environment(tmp_path), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(RUN_S):
            while len(running := await left()) < 4:
                await asyncio.sleep(0.2)
            async with DSecClient(keep=True) as client:
                for sandbox in running:
                    while "sleep" not in await commands(client, sandbox.id):
                        await asyncio.sleep(0.2)
            child.send_signal(signal.SIGINT)
            await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
    await nothing_is_left()


async def commands(client: DSecClient, id: str) -> str:
    """Names of the processes of a sandbox."""
    sandbox = await client.get(id)
    return (await sandbox.exec("cat /proc/[0-9]*/comm")).text


async def test_an_image_that_is_not_there_ends_the_run_before_any_sample(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such image in dsec: nowhere:9"):
        run("eval", "eval_task.py", "-T", "image=nowhere:9", logs=tmp_path)
    assert await left() == []
