"""Faults of output and input, seen by a client of the whole system on a real container."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from libdsec import DSecError, FilePermissionDenied, InvalidRequest, Sandbox, StdinClosed
from tests.conformance.harness import SLEEPERS
from tests.e2e.conftest import open_client
from tests.faults.conftest import HANG_S, World

pytestmark = [pytest.mark.docker]

REPOSITORY = Path(__file__).parents[2]
LIMIT = 10_000


@pytest.mark.parametrize(
    "command",
    [
        "setsid sleep 600 & sleep 600",
        "(setsid sh -c 'exec sleep 600' &) ; exec sleep 600",
        "yes & setsid yes >&2 & sleep 600",
    ],
)
@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_a_result_comes_whoever_still_holds_the_pipes(
    box: Sandbox, how: str, command: str
) -> None:
    """(E05)"""
    run = box.exec if how == "exec" else box.run_shell
    async with asyncio.timeout(HANG_S):
        ran = await run(command, timeout=0.5, output_limit_bytes=LIMIT)
    assert ran.timed_out
    left = await box.exec(SLEEPERS.replace("[s]leep", "[s]leep|[y]es"))
    assert left.text == "0\n"


@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_no_byte_is_lost_when_a_background_child_holds_the_pipe(
    box: Sandbox, how: str
) -> None:
    """(E06)"""
    run = box.exec if how == "exec" else box.run_shell
    for _ in range(10):
        ran = await run("head -c 2000000 /dev/zero | tr '\\0' x; sleep 30 & kill -9 $$")
        assert len(ran.stdout) == 2_000_000 == ran.stdout.count(b"x")
    await box.exec("killall -9 sleep")


async def test_input_ends_when_it_is_said_and_takes_no_more(box: Sandbox) -> None:
    """(E08)"""
    async with await box.spawn("wc -c") as process:
        await process.write("abc")
        await process.close_stdin()
        with pytest.raises(StdinClosed):
            await process.write("x")
        assert (await process.wait()).text.strip() == "3"
        with pytest.raises(StdinClosed):
            await process.write("x")
    script = "exec 0<&-; until [ -e /tmp/written ]; do sleep .05; done; echo end"
    async with await box.spawn(script) as process:
        await process.write("nobody reads this")
        await box.files.write("/tmp/written", b"")
        assert (await process.wait()).stdout == b"end\n"


async def test_input_comes_from_bytes_text_and_streams(box: Sandbox) -> None:
    """(E08) A stream that fails is not mistaken for the end of input."""

    async def slowly() -> object:
        for part in (b"a", b"", b"bc"):
            await asyncio.sleep(0.05)
            yield part

    async def broken() -> object:
        yield b"half"
        raise ValueError("no more")

    for stdin in (b"abc", "abc", [b"a", b"bc"], slowly(), iter((b"ab", b"c"))):
        assert (await box.exec("cat", stdin=stdin)).stdout == b"abc"
    with pytest.raises(ValueError, match="no more"):
        await box.exec("cat >/dev/null; touch /tmp/whole", stdin=broken(), timeout=HANG_S)
    assert not await box.files.exists("/tmp/whole")
    assert (await box.exec("head -c 1", stdin=(b"y" * 65536 for _ in range(200)))).stdout == b"y"


async def test_a_character_split_over_two_writes_stays_one(box: Sandbox) -> None:
    """(E14)"""
    script = "printf '\\303'; sleep .05; printf '\\251'; sleep .05; printf '\\360\\237'"
    async with await box.spawn(f"{script}; sleep .05; printf '\\230\\200\\303'") as process:
        parts = [text async for text in process.stdout.text()]
    assert "".join(parts) == "é😀\ufffd"


@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_the_command_is_the_shells_to_read(box: Sandbox, how: str) -> None:
    """(E15)"""
    run = box.exec if how == "exec" else box.run_shell
    ran = await run("x=$((1<<3)); [ a \\< b ] && cat <<EOF\n$x\nEOF")
    assert ran.stdout == b"8\n"
    ran = await run("case x in (x) echo ok;; esac; echo 'a;b' \"$(echo '(')\" `echo b` {a,b} \\;")
    assert ran.text.startswith("ok\na;b ( b ") and ran.text.endswith(" ;\n")
    ran = await run('echo "unterminated', timeout=HANG_S)
    assert ran.exit_code == 2 and ran.stderr


@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_what_is_dropped_is_said_to_the_byte(box: Sandbox, how: str) -> None:
    """(E16) Below what comes with the reply and above it."""
    run = box.exec if how == "exec" else box.run_shell
    for limit in (LIMIT, 300_000):
        for size, dropped in ((limit, 0), (limit + 1, 1), (limit * 3, limit * 2)):
            ran = await run(f"head -c {size} /dev/zero >&2", output_limit_bytes=limit)
            assert (ran.truncated, len(ran.stderr)) == ((0, dropped), size - dropped)
    ran = await run("echo x", output_limit_bytes=0)
    assert (ran.truncated, ran.stdout) == ((2, 0), b"")


@pytest.mark.parametrize("how", ["exec", "shell"])
async def test_head_tail_and_code_are_kept(box: Sandbox, how: str) -> None:
    """(E17)"""
    run = box.exec if how == "exec" else box.run_shell
    much = "head -c 20000000 /dev/zero | tr '\\0' A"
    script = f"echo BEGIN; {much}; echo LAST; echo END >&2; (exit 4)"
    ran = await run(script, output_limit_bytes=1 << 20)
    assert (ran.exit_code, ran.stderr, ran.truncated[1]) == (4, b"END\n", 0)
    assert ran.stdout.startswith(b"BEGIN\nAAA") and ran.stdout.endswith(b"AAALAST\n")
    assert len(ran.stdout) + ran.truncated[0] == 20_000_011 and len(ran.stdout) == 1 << 20


async def test_each_stream_has_its_own_budget(box: Sandbox) -> None:
    """(E18)"""
    for run in (box.exec, box.run_shell):
        ran = await run(
            "head -c 100001 /dev/zero; echo fatal >&2; (exit 1)", output_limit_bytes=100_000
        )
        assert (ran.exit_code, ran.stderr, ran.truncated) == (1, b"fatal\n", (1, 0))


async def test_merged_output_keeps_the_order_of_writing(box: Sandbox) -> None:
    """(E20)"""
    script = "for i in $(seq 200); do echo o$i; echo e$i >&2; done"
    wanted = [f"{c}{i}" for i in range(1, 201) for c in "oe"]
    ran = await box.exec(script, merge=True)
    assert (ran.text.split(), ran.stderr) == (wanted, b"")
    ran = await box.session().run(script, merge=True)
    assert (ran.text.split(), ran.stderr) == (wanted, b"")
    ran = await box.exec(script)
    assert ran.text.split() == wanted[::2] and ran.stderr_text.split() == wanted[1::2]


async def test_a_terminal_has_its_size_from_the_start(box: Sandbox) -> None:
    """(E27)"""
    for number in range(30):
        async with await box.interact("stty size; read x; stty size", pty=(40, 120)) as talk:
            if number % 2:
                await talk.process.resize(50, 200)
            first = await talk.expect("40 120\r\n", "50 200\r\n")
            assert number % 2 or first.index == 0
            await talk.process.resize(50, 200)
            await talk.sendline()
            assert (await talk.expect("50 200\r\n")).index == 0


async def slow_link(url: str, delay_s: float) -> asyncio.Server:
    """A way to the server that takes ``delay_s`` longer in each direction."""
    host, _, port = url.rpartition("/")[2].rpartition("@")[2].partition(":")

    async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(65536):
            loop.call_later(delay_s, sink.write, data)
        loop.call_later(delay_s, sink.close)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    return await asyncio.start_server(connected, "127.0.0.1", 0)


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
async def test_a_time_limit_is_a_result_with_what_came(
    world: World, box: Sandbox, delay_s: float
) -> None:
    """(E31) Longer than requests are answered in, silent all the time, over a slow link."""
    link = await slow_link(world.system.url, delay_s)
    url = f"nats://127.0.0.1:{link.sockets[0].getsockname()[1]}"
    async with link, open_client(world.system, url=url, keep=True) as far:
        there = await far.get(box.id)
        began = time.monotonic()
        ran = await there.exec("echo early; echo oops >&2; sleep 600", timeout=3)
        took_s = time.monotonic() - began
        link.close()
    assert (ran.timed_out, ran.exit_code) == (True, None)
    assert (ran.stdout, ran.stderr) == (b"early\n", b"oops\n")
    assert 3 <= ran.duration_s <= took_s < HANG_S


async def test_user_home_groups_and_umask_are_those_of_each_call(box: Sandbox) -> None:
    """(E33)"""
    show = "id -u; id -g; id -G; echo $HOME $USER $LOGNAME; umask"
    wanted = {
        "root": "0\n0\n0\n/root root root\n0022\n",
        "agent": "1000\n1000\n1000 2000\n/home/agent agent agent\n0022\n",
        "nobody": "65534\n65534\n65534\n/nonexistent nobody nobody\n0022\n",
        "1000": "1000\n1000\n1000 2000\n/home/agent agent agent\n0022\n",
        "agent:tools": "1000\n2000\n2000\n/home/agent agent agent\n0022\n",
        "agent:77": "1000\n77\n77 2000\n/home/agent agent agent\n0022\n",
        "4321:77": "4321\n77\n77\n/ 4321 4321\n0022\n",
    }
    for user, said in wanted.items():
        assert (await box.exec(show, user=user)).text == said, user
    for user in ("mallory", "agent:nogroup-such", "1000:nosuch", ":tools", "agent:", "-1"):
        for call in (box.exec("id", user=user), box.session("x" + user, user=user).run("id")):
            with pytest.raises(InvalidRequest) as caught:
                await call
            assert caught.value.field == "user", user
    await box.files.write("/flag", "secret\n", mode=0o400)
    with pytest.raises(FilePermissionDenied):
        await box.files.read("/flag", user="nobody")
    for run in (box.exec("cat /flag", user="nobody"), box.run_shell("cat /flag", session="n",
                                                                  user="nobody")):  # fmt: skip
        assert (await run).exit_code == 1
    async with await box.interact("id -u; cat /flag", user="nobody") as talk:
        assert b"65534" in await talk.expect_end()


async def test_the_command_line_client_ends_whatever_its_input_does(
    world: World, box: Sandbox
) -> None:
    """(E34) The input is an open pipe that never closes."""
    reading, writing = os.pipe()
    env = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "DSEC_URL": world.system.url,
        "DSEC_API_KEY": world.system.admin_key, "DSEC_PROJECT": world.system.project,
    }  # fmt: skip
    try:
        for options in ((), ("-i",)):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "libdsec", "exec", *options, box.id, "--", "echo hi",
                stdin=reading, stdout=asyncio.subprocess.PIPE, env=env,
            )  # fmt: skip
            out, _ = await asyncio.wait_for(process.communicate(), HANG_S)
            assert (process.returncode, out) == (0, b"hi\n")
    finally:
        os.close(reading)
        os.close(writing)


async def test_signal_zero_only_asks(box: Sandbox) -> None:
    """(E35)"""
    process = await box.spawn("read x; exit 3")
    for number in (0, 0, "0"):
        await process.signal(number)
    await process.write("\n")
    assert (await process.wait()).exit_code == 3
    with pytest.raises(DSecError) as caught:
        await process.signal(0)
    assert caught.value.code == "not_found"
    for nonsense in (65, "NOSUCH", -1):
        async with await box.spawn("sleep 60", stdin=False) as process:
            with pytest.raises(InvalidRequest) as refused:
                await process.signal(nonsense)
                await process.wait()
            assert refused.value.field == "signal"
