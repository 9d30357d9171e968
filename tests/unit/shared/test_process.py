"""A service's process ends when told, says why it cannot start, and never hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROLOGUE = """
import asyncio, sys
from shared import process, settings
config = process.configured("test", settings.Common)
"""


def run(body: str, *, kill_after_s: float | None = None, **env: str) -> tuple[int, str, float]:
    """Exit code, standard error and seconds from the signal to the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + body], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    assert process.stdout is not None
    if kill_after_s is not None:
        assert process.stdout.readline() == "up\n"
        time.sleep(kill_after_s)
        process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    return process.returncode, err, time.monotonic() - began


def test_a_signal_ends_it_in_order() -> None:
    code, err, _ = run(
        """
async def main(stop):
    print("up", flush=True)
    await stop.wait()
    print("ended in order", file=sys.stderr)
process.run("test", config, main)
""",
        kill_after_s=0.1,
    )
    assert (code, "ended in order" in err) == (0, True)


def test_one_that_does_not_end_is_ended() -> None:
    code, err, took_s = run(
        """
async def main(stop):
    print("up", flush=True)
    await asyncio.sleep(3600)
process.run("test", config, main)
""",
        kill_after_s=0.1,
        DSEC_SHUTDOWN_S="0.5",
    )
    assert code == 0
    assert "did not end in 0.5 s" in err
    assert took_s < 60


def test_a_typed_error_is_one_line() -> None:
    code, err, _ = run(
        """
from shared.errors import Unavailable
async def main(stop):
    raise Unavailable("bus: ended for good")
process.run("test", config, main)
"""
    )
    assert code == 1
    assert err.strip().splitlines()[-1] == "test: bus: ended for good"
    assert "Traceback" not in err


def test_a_bad_setting_is_one_line_that_names_it() -> None:
    code, err, _ = run("", DSEC_HEALTH_PORT="http")
    assert (code, "Traceback" in err) == (1, False)
    assert "DSEC_HEALTH_PORT" in err


def test_a_bug_shows_its_traceback() -> None:
    code, err, _ = run("async def main(stop): 1 / 0\nprocess.run('test', config, main)")
    assert code != 0
    assert "ZeroDivisionError" in err


def test_a_task_that_swallows_its_cancel_does_not_keep_the_process() -> None:
    code, err, took_s = run(
        """
async def stubborn():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
async def main(stop):
    asyncio.create_task(stubborn(), name="stubborn")
    print("up", flush=True)
    await stop.wait()
process.run("test", config, main)
""",
        kill_after_s=0.1,
    )
    assert (code, "left behind at the end: stubborn" in err) == (0, True)
    assert took_s < 60
