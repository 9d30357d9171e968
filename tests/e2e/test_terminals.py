"""Terminals and re-attaching over the whole path: client, bus, edge, agent, container."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec._ids import new
from libdsec.errors import Conflict, NotFound, StdinClosed, Unsupported
from libdsec.process import Process
from services.local import LocalSystem
from tests.e2e.conftest import until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
ARGS = DSecContainerRunArgs(container_image="py:3.11", memory_limit_mb=256)
SHOWN_S = 60.0
HELD = "sh -c 'echo he''ld; exec sleep 300'"
"""A program of the terminal that says when it has it."""


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(containers: DSecClient) -> AsyncIterator[Sandbox]:
    made = await containers.run_container(ARGS, timeout=120)
    yield made
    await made.stop()


async def shown(process: Process, text: str) -> bytes:
    seen = b""
    async with asyncio.timeout(SHOWN_S):
        async for data in process.stdout:
            seen += data
            if text.encode() in seen:
                return seen
    raise AssertionError(f"{text!r} was not shown: {seen!r}")


async def test_a_process_on_a_terminal(sandbox: Sandbox) -> None:
    """(E21, E27)"""
    process = await sandbox.spawn("stty size; read x; stty size; exit 5", pty=(40, 120))
    await shown(process, "40 120\r\n")
    await process.resize(50, 200)
    await process.write("\n")
    await shown(process, "50 200\r\n")
    result = await process.wait()
    assert (result.exit_code, result.stderr) == (5, b"")


async def test_input_ends_once(sandbox: Sandbox) -> None:
    """(E08)"""
    process = await sandbox.spawn("stty -echo; echo on; wc -c", pty=(24, 80))
    await shown(process, "on\r\n")
    await process.write("abc\n")
    await process.close_stdin()
    with pytest.raises(StdinClosed):
        await process.write("x")
    assert (await process.wait()).stdout == b"4\r\n"


async def test_only_a_terminal_has_a_size(sandbox: Sandbox) -> None:
    async with await sandbox.spawn("sleep 60") as process:
        with pytest.raises(Unsupported):
            await process.resize(1, 1)


async def test_a_signal_right_after_the_start_is_not_lost(sandbox: Sandbox) -> None:
    for _ in range(10):
        process = await sandbox.spawn("sleep 60", stdin=False)
        await process.signal("TERM")
        assert (await asyncio.wait_for(process.wait(), SHOWN_S)).signal == "TERM"


async def test_signal_zero_only_asks(sandbox: Sandbox) -> None:
    """(E35)"""
    process = await sandbox.spawn("read x; exit 3")
    for _ in range(3):
        await process.signal(0)
    await process.write("\n")
    assert (await process.wait()).exit_code == 3
    with pytest.raises(NotFound):
        await process.signal(0)


async def test_another_client_attaches_with_all_output_and_goes_on(
    container_system: LocalSystem, sandbox: Sandbox
) -> None:
    from tests.e2e.conftest import open_client

    first = await sandbox.spawn("echo one; read a; echo got $a; read b; echo got $b; exit 4")
    assert await shown(first, "one\n")
    await first.write("x\n")
    assert await shown(first, "got x\n")
    async with open_client(container_system) as other:
        second = await (await other.get(sandbox.id)).attach(first.op_id)
        assert await shown(second, "got x\n") == b"one\ngot x\n"
        await second.write("y\n")
        result = await asyncio.wait_for(second.wait(), SHOWN_S)
        assert (result.exit_code, result.stdout) == (4, b"got y\n")
        again = await (await other.get(sandbox.id)).attach(first.op_id, offset=4)
        result = await asyncio.wait_for(again.wait(), SHOWN_S)
        assert (result.exit_code, result.stdout) == (4, b"got x\ngot y\n")
    with pytest.raises(Conflict):
        await first.wait()


async def test_attaching_to_nothing_says_so(sandbox: Sandbox) -> None:
    with pytest.raises(NotFound) as caught:
        await (await sandbox.attach(new())).wait()
    assert caught.value.field == "op_id"


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_commands_outlive_the_edge_and_run_once(
    container_system: LocalSystem, sandbox: Sandbox, how: str
) -> None:
    script = "echo ran >>/tmp/runs; echo early; sleep 3; echo late; exit 6"
    streamed = await sandbox.spawn(script, stdin=False)
    assert await shown(streamed, "early\n")
    talking = await sandbox.spawn("stty -echo; echo on; read x; echo got $x", pty=(24, 80))
    assert await shown(talking, "on\r\n")
    plain = asyncio.create_task(sandbox.exec(script))

    async def both_run() -> bool:
        return (await sandbox.files.read("/tmp/runs")) == b"ran\nran\n"

    await until(both_run, what="both run")
    await _restart_edge(container_system, how)
    result = await asyncio.wait_for(streamed.wait(), 60)
    assert (result.exit_code, result.stdout) == (6, b"late\n")
    result = await asyncio.wait_for(plain, 60)
    assert (result.exit_code, result.stdout) == (6, b"early\nlate\n")
    await talking.write("word\n")
    assert await shown(talking, "got word\r\n")
    assert (await talking.wait()).exit_code == 0
    assert await sandbox.files.read("/tmp/runs") == b"ran\nran\n"


async def _restart_edge(system: LocalSystem, how: str) -> None:
    edge = next(name for name in system.services if name.startswith("edge"))
    if how == "kill":
        await system.kill(edge)
    await system.restart(edge)


class Seat:
    """``dsec shell`` on a terminal of ours."""

    def __init__(self, system: LocalSystem, id: str, rows: int, cols: int) -> None:
        self.master, self.slave = pty.openpty()
        self.size(rows, cols)
        self.before = termios.tcgetattr(self.slave)
        os.set_blocking(self.master, False)
        self.env = {
            **os.environ, "PYTHONPATH": str(REPOSITORY), "DSEC_URL": system.url,
            "DSEC_API_KEY": system.admin_key, "DSEC_PROJECT": system.project,
        }  # fmt: skip
        self.argv = [sys.executable, "-m", "libdsec", "shell", id]
        self.seen = b""

    async def __aenter__(self) -> Seat:
        self.process = await asyncio.create_subprocess_exec(
            *self.argv, env=self.env, stdin=self.slave, stdout=self.slave, stderr=self.slave
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def size(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    async def shown(self, text: str) -> None:
        end = time.monotonic() + SHOWN_S
        while text.encode() not in self.seen:
            assert time.monotonic() < end, f"{text!r} was not shown: {self.seen!r}"
            assert self.process.returncode is None, f"it ended: {self.seen!r}"
            try:
                self.seen += os.read(self.master, 65536)
            except BlockingIOError:
                await asyncio.sleep(0.02)
        self.seen = self.seen.partition(text.encode())[2]

    async def ended(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), SHOWN_S)
        assert termios.tcgetattr(self.slave) == self.before, "the terminal is as it was"
        return code


async def test_a_shell_is_a_real_terminal(container_system: LocalSystem, sandbox: Sandbox) -> None:
    """(E27) Sizes, Ctrl-C, Ctrl-Z and the exit code."""
    async with Seat(container_system, sandbox.id, 33, 111) as seat:
        seat.type("stty size; echo $TERM; PS1='rea''dy> '\n")
        await seat.shown("33 111\r\n")
        await seat.shown("xterm-256color")
        await seat.shown("ready> ")
        seat.size(44, 99)
        seat.process.send_signal(signal.SIGWINCH)  # our terminal is not its own
        seat.type("until stty size | grep '44 99'; do sleep .1; done\n")
        await seat.shown("44 99\r\n")
        seat.type(f"{HELD}; echo code=$?\n")
        await seat.shown("held")
        seat.type("\x03")
        seat.type("echo code=$?\n")
        await seat.shown("code=130")
        seat.type(f"{HELD}\n")
        await seat.shown("held")
        seat.type("\x1a")
        await seat.shown("Stopped")
        seat.type("kill %1; exit 9\n")
        seat.type("exit 9\n")
        assert await seat.ended() == 9


async def test_a_shell_that_is_ended_puts_the_terminal_back_and_leaves_nothing(
    container_system: LocalSystem, sandbox: Sandbox
) -> None:
    async with Seat(container_system, sandbox.id, 24, 80) as seat:
        seat.type("PS1='rea''dy> '\n")
        await seat.shown("ready> ")
        seat.type("sh -c 'echo he''ld; exec sleep 333'\n")
        await seat.shown("held")
        seat.process.terminate()
        assert await seat.ended() == 128 + signal.SIGTERM
    await until(lambda: _no_sleeper(sandbox), what="nothing is left")


async def _no_sleeper(sandbox: Sandbox) -> bool:
    found = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 33[3] '")
    return found.stdout == b""


async def test_a_shell_without_a_terminal_runs_lines(
    container_system: LocalSystem, sandbox: Sandbox
) -> None:
    seat = Seat(container_system, sandbox.id, 24, 80)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *seat.argv, env=seat.env, stdin=pipe, stdout=pipe
    )
    out, _ = await asyncio.wait_for(process.communicate(b"cd /tmp\npwd; test -t 0\n"), SHOWN_S)
    assert (process.returncode, out) == (1, b"/tmp\n")
    os.close(seat.master)
    os.close(seat.slave)
