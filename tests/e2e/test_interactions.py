"""Talking to programs and sessions over the whole path: what is expected, interrupted,
signalled, and left to itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from libdsec import (
    DSecContainerRunArgs,
    ExpectEnded,
    ExpectTimeout,
    InvalidRequest,
    Sandbox,
    StdinClosed,
    sync,
)
from services.local import LocalSystem
from tests.e2e.conftest import open_client, until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ARGS = DSecContainerRunArgs(container_image="py:3.11", memory_limit_mb=256)
HANG_S = 60.0
"""What has not come by then does not come."""


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def sandbox(container_system: LocalSystem) -> AsyncIterator[Sandbox]:
    async with open_client(container_system, keep=False) as client:
        yield await client.run_container(ARGS, timeout=120)


# -- expect ------------------------------------------------------------------------


@pytest.mark.parametrize("pty", [(24, 80), None], ids=["terminal", "pipes"])
async def test_a_program_is_talked_to_by_what_it_says(
    sandbox: Sandbox, pty: tuple[int, int] | None
) -> None:
    script = (
        "import sys\nprint('name?', end=' ', flush=True)\nname = input()\n"
        "print('hello ' + name, file=sys.stderr, flush=True)\nprint('more?', flush=True)\n"
        "sys.exit(int(input()))"
    )
    async with await sandbox.interact("python3", "-c", script, pty=pty) as talk:
        assert (await talk.expect("name? ")).before == b""
        await talk.sendline("é")
        found = await talk.expect(re.compile(r"hello (\w+|é)"), timeout=HANG_S)
        assert found.match is not None and found.match.group(1).decode() == "é"
        found = await talk.expect(["nothing", b"more?", re.compile(b"m")], timeout=HANG_S)
        assert (found.index, found.data) == (1, b"more?"), "of those at one place the first"
        await talk.send("7\n")
        rest = await talk.expect_end(timeout=HANG_S)
        assert rest.strip() in (b"", b"7"), "a terminal echoes"
        assert (await talk.wait()).exit_code == 7
        with pytest.raises(StdinClosed):
            await talk.sendline("anybody?")


async def test_what_does_not_come_is_a_typed_error_and_nothing_is_lost(sandbox: Sandbox) -> None:
    script = "echo one; read x; echo two; exit 3"
    async with await sandbox.interact(script, pty=None) as talk:


        async def nothing_but_one() -> bool:
            for error in (ExpectTimeout, TimeoutError):
                with pytest.raises(error) as caught:
                    await talk.expect("two", timeout=0.2)
            return caught.value.before == b"one\n"

        await until(nothing_but_one, what="what came is told")
        await talk.sendline()
        assert (await talk.expect("two")).before == b"one\n"
        for error in (ExpectEnded, EOFError):
            with pytest.raises(error):
                await talk.expect("three", timeout=HANG_S)
        assert (await talk.wait()).exit_code == 3
    for nothing in ((), ("",), (b"",), ([],)):
        with pytest.raises(InvalidRequest) as refused:
            await talk.expect(*nothing)
        assert refused.value.field == "patterns"


async def test_what_nobody_expected_is_kept_up_to_a_limit(sandbox: Sandbox) -> None:
    script = "head -c 300000 /dev/zero | tr '\\0' x; echo END; read x"
    async with await sandbox.interact(script, pty=None, buffer_bytes=1000) as talk:
        found = await talk.expect("END\n", timeout=HANG_S)
        assert len(found.before) <= 1000 and set(found.before) == {ord("x")}
        assert found.dropped + len(found.before) == 300_000
    parts = ("aaaa", "bb", "bb\\303", "\\251")
    script = "sleep .2; ".join(f"printf '{part}'; " for part in parts)
    async with await sandbox.interact(script, pty=None) as talk:
        assert (await talk.expect("bbbbé")).before == b"aaaa", "over chunks and characters"


async def test_keys_and_the_end_of_input(sandbox: Sandbox) -> None:
    async with await sandbox.interact("python3", "-q", "-i") as talk:
        await talk.expect(">>> ")
        await talk.sendline("import time; print('as' + 'leep'); time.sleep(600)")
        await talk.expect("asleep")
        await talk.sendcontrol("c")
        await talk.expect("KeyboardInterrupt", timeout=HANG_S)
        await talk.expect(">>> ")
        with pytest.raises(InvalidRequest):
            await talk.sendcontrol("é")
        await talk.sendline("exit(4)")
        await talk.expect_end(timeout=HANG_S)
        assert (await talk.wait()).exit_code == 4
    async with await sandbox.interact("cat") as talk:
        await talk.sendline("on")
        await talk.expect("on\r\non\r\n")
        await talk.sendeof()
        assert await talk.expect_end(timeout=HANG_S) == b"" and (await talk.wait()).ok


async def test_a_command_begun_before_is_talked_to_by_its_id(sandbox: Sandbox) -> None:
    """In the background, over the connection that began it, too."""
    begun = await sandbox.spawn("echo one; read x; echo got $x; exit 4")
    again = await sandbox.attach(begun.op_id)
    talk = again.interact()
    assert (await talk.expect("one\n", timeout=HANG_S)).before == b""
    await talk.sendline("y")
    assert (await talk.expect("got y\n", timeout=HANG_S)).before == b""
    assert (await talk.wait()).exit_code == 4


async def test_leaving_a_conversation_kills_the_program(sandbox: Sandbox) -> None:
    async with await sandbox.interact("setsid sleep 341 & echo on; wait") as talk:
        await talk.expect("on")
    left = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 34[1] '")
    assert left.stdout == b"0\n"


# -- sessions ----------------------------------------------------------------------


async def test_an_interrupt_keeps_the_session(sandbox: Sandbox) -> None:
    shell = sandbox.session("interrupted")
    assert not await shell.interrupt(), "nothing runs"
    await shell.run("cd /tmp; X=5; f() { sh -c ': >/tmp/in-f; exec sleep 600'; }; sleep 600 &")
    running = asyncio.create_task(sandbox.run_shell("f; echo after", session="interrupted"))
    await until(lambda: sandbox.files.exists("/tmp/in-f"), what="the function runs")
    queued = asyncio.create_task(shell.run("echo $X"))
    assert await shell.interrupt()
    ran = await asyncio.wait_for(running, HANG_S)
    assert (ran.exit_code, ran.signal, ran.stdout) == (130, "INT", b"")
    assert (await asyncio.wait_for(queued, HANG_S)).stdout == b"5\n"
    ran = await shell.run("pwd; jobs | wc -l")
    assert ran.stdout.split() == [b"/tmp", b"1"] and not ran.session_fresh


async def test_a_closed_session_is_gone_with_its_jobs(sandbox: Sandbox) -> None:
    async with sandbox.session("closed") as shell:
        await shell.run("X=1; trap 'echo bye >/tmp/bye' EXIT; sleep 351 &")
        stuck = asyncio.create_task(shell.run(": >/tmp/stuck; sleep 352"))
        await until(lambda: sandbox.files.exists("/tmp/stuck"), what="a command runs")
    assert (await stuck).signal == "KILL"
    assert await sandbox.files.read("/tmp/bye") == b"bye\n"
    left = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 35[12] '")
    assert left.stdout == b"0\n"
    ran = await sandbox.run_shell("echo x$X", session="closed")
    assert (ran.stdout, ran.session_fresh) == (b"x\n", True)


async def test_a_session_streams_and_is_signalled(sandbox: Sandbox) -> None:
    script = "sh -c 'echo on; exec sleep 600'; echo $?"
    process = await sandbox.spawn(script, session="streamed")
    assert await process.stdout.__anext__() == b"on\n"
    await process.signal("USR1")
    result = await asyncio.wait_for(process.wait(), HANG_S)
    assert (result.exit_code, result.stdout) == (0, b"138\n")
    process = await sandbox.spawn("X=5; echo on; sleep 600", session="streamed")
    assert await process.stdout.__anext__() == b"on\n"
    await process.kill()
    await process.wait()
    assert (await sandbox.run_shell("echo $X", session="streamed")).stdout == b"5\n"


# -- signals -----------------------------------------------------------------------


async def test_a_signal_reaches_the_process_group_of_the_command(sandbox: Sandbox) -> None:
    """What left the group, and what left the tree to live on, hears nothing of it."""
    child = "trap \"echo $0; exit\" TERM; echo up; while :; do sleep .05; done"
    script = (
        f"trap 'got=1; echo parent' TERM; sh -c '{child}' child & child=$!; "
        f"setsid sh -c '{child}' other & other=$!; "
        "while [ -z $got ]; do sleep .05; done; wait $child; kill -TERM $other; wait"
    )
    process = await sandbox.spawn(script, stdin=False, timeout=HANG_S)
    talk = process.interact()
    await talk.expect("up\n")
    await talk.expect("up\n")
    await process.signal("TERM")
    said = await talk.expect_end(timeout=HANG_S)
    assert sorted(said.split()[:2]) == [b"child", b"parent"] and said.split()[-1] == b"other"


# -- the synchronous face ----------------------------------------------------------


async def test_sessions_and_conversations_without_a_loop(
    container_system: LocalSystem, sandbox: Sandbox
) -> None:
    options = {
        "url": container_system.url, "api_key": container_system.admin_key,
        "project": container_system.project,
    }  # fmt: skip

    def work() -> None:
        with sync.DSecClient(**options, keep=True) as client:
            box = client.get(sandbox.id)
            shell = box.session("plain")
            assert isinstance(shell, sync.Session) and shell.name == "plain"
            shell.run("X=3")
            assert shell.run("echo $X", check=True).text == "3\n"
            with box.interact("read x; echo got $x", pty=None) as talk:
                talk.sendline("it")
                assert talk.expect(re.compile("got (.*)\n")).match.group(1) == b"it"
                assert talk.process.wait().ok
            assert box.exec("cat", stdin=(b"a", b"b")).text == "ab"
            shell.close()

    await asyncio.get_running_loop().run_in_executor(None, work)


async def test_sessions_of_two_clients_are_the_same(
    container_system: LocalSystem, sandbox: Sandbox
) -> None:
    await sandbox.run_shell("X=7", session="shared")
    async with open_client(container_system) as other:
        ran = await (await other.get(sandbox.id)).run_shell("echo $X", session="shared")
    assert ran.stdout == b"7\n"
