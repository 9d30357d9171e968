"""Commands on a terminal in real containers: size, keys, job control, hang-up; and
signals that come early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.edge.drivers.base import ExecOutcome, ExecSpec, Handle, Resize
from services.edge.drivers.container import ContainerDriver
from shared.errors import InvalidRequest
from tests.conformance.harness import HANG_S, Recorder, run, until
from tests.integration.container.harness import ContainerHarness

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

Box = tuple[ContainerDriver, Handle]
SIZE = Resize(40, 120)


@pytest.fixture
def box(driver: ContainerDriver, sandbox: Handle) -> Box:
    return driver, sandbox


class Terminal(Recorder):
    """Somebody at a terminal: types, resizes, waits for what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def input(self) -> AsyncIterator[bytes]:
        while (typed := await self.keys.get()) is not None:
            yield typed

    def type(self, text: str) -> None:
        self.keys.put_nowait(text.encode())

    async def shown(self, text: str) -> None:
        try:
            await until(lambda: text.encode() in self.stdout)
        except TimeoutError:
            pytest.fail(f"{text!r} was not shown: {self.stdout!r}")

    def open(
        self, box: Box, op_id: str, command: str, **changes: object
    ) -> asyncio.Task[ExecOutcome]:
        given = {"pty": SIZE, "stdin": True, "timeout_s": 60, **changes}
        spec = ExecSpec(op_id=op_id, shell=command, **given)  # type: ignore[arg-type]
        return asyncio.create_task(box[0].exec(box[1], spec, self))


async def test_the_size_is_there_from_the_first_moment_and_changes_follow(box: Box) -> None:
    """(E27) A hundred times: the start's size is never overtaken, nor is it 0x0."""
    for number in range(100):
        seat = Terminal()
        if number % 2:
            seat.order(Resize(50, 200))
        work = seat.open(box, f"size{number}", "stty size; read x; stty size")
        if number % 2 == 0:
            await seat.shown("40 120\r\n")
            seat.order(Resize(50, 200))
        seat.type("\n")
        outcome = await work
        first, last = [line for line in seat.stdout.split(b"\r\n") if line]
        assert outcome.exit_code == 0 and last == b"50 200"
        assert first in ({b"40 120"} if number % 2 == 0 else {b"40 120", b"50 200"})


async def test_a_terminal_is_one_and_its_own(box: Box) -> None:
    script = "test -t 0 && test -t 1 && test -t 2; echo $?; tty; echo $TERM.$PAGER; echo err >&2"
    ran = await run(*box, script, pty=SIZE, user="agent")
    shown = ran.stdout.decode().split("\r\n")
    assert shown[0] == "0" and shown[1].startswith("/dev/pts/")
    assert shown[2:] == ["xterm-256color.", "err", ""] and ran.stderr == b""
    ran = await run(*box, "echo hello >/dev/tty; stat -c %u $(tty)", pty=SIZE, user="agent")
    assert ran.stdout == b"hello\r\n1000\r\n", "the controlling terminal, and the user's"
    ran = await run(*box, "tty; echo $TERM.$PAGER")
    assert ran.stdout == b"not a tty\ndumb.cat\n"


async def test_ctrl_c_reaches_the_foreground_group_alone(box: Box) -> None:
    seat = Terminal()
    script = "trap 'echo shell-goes-on' INT; sh -c 'echo go; sleep 30'; echo $?"
    work = seat.open(box, "ctrlc", script)
    await seat.shown("go")
    seat.type("\x03")
    outcome = await work
    assert b"shell-goes-on" in seat.stdout and b"130" in seat.stdout
    assert outcome.exit_code == 0


async def test_an_interactive_shell_has_job_control(box: Box) -> None:
    seat = Terminal()
    work = seat.open(box, "jobs", "exec sh -i")
    job = "trap \"echo awa\"\"ke\" CONT; echo he\"\"ld; while :; do sleep .1; done"
    seat.type(f"sh -c '{job}'\n")
    await seat.shown("held")
    seat.type("\x1a")
    await seat.shown("Stopped")
    seat.type("jobs; fg\n")
    await seat.shown("awake")
    seat.type("\x03")
    seat.type("echo back=$?\n")
    await seat.shown("back=130")
    seat.type("exit 7\n")
    assert (await work).exit_code == 7


async def test_the_end_of_input_is_typed(box: Box) -> None:
    """(E08) Where a line was begun it is ended first."""
    for text in ("abc\n", "abc"):
        seat = Terminal()
        work = seat.open(box, "eof" + text.strip() + str(len(text)), "stty -echo; echo on; wc -c")
        await seat.shown("on")
        seat.type(text)
        seat.keys.put_nowait(None)
        outcome = await work
        assert outcome.exit_code == 0 and seat.stdout.split() == [b"on", str(len(text)).encode()]


async def test_the_exit_comes_after_the_last_byte(box: Box) -> None:
    """(E21) Also where the reader is slow: a terminal's output is not dropped."""
    seat = Terminal()
    seat.delay_s = 0.002
    script = "i=0; while [ $i -lt 20000 ]; do echo line-$i; i=$((i+1)); done; echo last; exit 5"
    outcome = await seat.open(box, "slow", script, output_limit_bytes=1000)
    lines = seat.stdout.split(b"\r\n")
    assert outcome.exit_code == 5 and lines[-2:] == [b"last", b""] and len(lines) == 20002
    assert outcome.truncated == (0, 0)


async def test_exit_codes_and_signals_are_the_commands(box: Box) -> None:
    assert (await run(*box, "exit 3", pty=SIZE)).code == 3
    ran = await run(*box, "kill -TERM $$", pty=SIZE)
    assert (ran.code, ran.outcome.signal) == (143, "TERM")
    assert (await run(*box, ["/nowhere"], pty=SIZE)).code == 127
    ran = await run(*box, "sleep 60", pty=SIZE, timeout_s=0.3)
    assert ran.outcome.timed_out


async def test_cancelling_kills_all_that_runs_on_the_terminal(box: Box) -> None:
    seat = Terminal()
    work = seat.open(box, "hang", "trap '' HUP; setsid sleep 311 & nohup sleep 312 & echo on; wait")
    await seat.shown("on")
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    left = await run(*box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 31[12]'")
    assert left.stdout.strip() == b"0"


async def test_what_a_terminal_leaves_behind_is_hung_up(box: Box) -> None:
    apart = "setsid sh -c ': >/tmp/apart; exec sleep 322' &"
    wait = "until [ -e /tmp/apart ]; do sleep .02; done"
    ran = await run(*box, f"sleep 321 & {apart} {wait}; echo on", pty=SIZE)
    assert ran.code == 0 and b"on\r\n" in ran.stdout
    look = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'slee[p] 32[12] '"
    async with asyncio.timeout(60):
        while (left := await run(*box, look)).stdout != b"sleep 322 \n":  # which left it
            assert b"sleep 322 " in left.stdout
            await asyncio.sleep(0.05)


async def test_sizes_that_no_terminal_has_are_refused(box: Box) -> None:
    for size in (Resize(0, 80), Resize(24, 0), Resize(70_000, 80)):
        with pytest.raises(InvalidRequest) as caught:
            await run(*box, "true", pty=size)
        assert caught.value.field == "pty"
    with pytest.raises(InvalidRequest) as caught:
        await run(*box, "true", pty=SIZE, session="s")
    assert caught.value.field == "pty"


async def test_the_workload_cannot_put_something_else_in_the_terminals_place(box: Box) -> None:
    await run(*box, "rm -f /dev/ptmx; mkfifo /dev/ptmx")
    assert (await run(*box, "stty size", pty=SIZE)).stdout == b"40 120\r\n"


async def test_a_terminal_goes_on_after_the_edge_restarts(
    harness: ContainerHarness, sandbox: Handle
) -> None:
    seat = Terminal()
    old = seat.open((harness.driver, sandbox), "resumed", "stty -echo; echo on; exec sh")
    await seat.shown("on")
    typed = "x=5; echo ta''ken\n"
    seat.type(typed)
    await seat.shown("taken")
    fresh = await harness.restart()
    assert await fresh.recover(sandbox, harness.spec(uid=sandbox.uid))
    again = Resumed()
    work = asyncio.create_task(fresh.resume_exec(sandbox, "resumed", again, stdin=True))
    again.type("echo x=$x; exit 4\n")
    outcome = await work
    assert outcome is not None and outcome.exit_code == 4
    assert b"x=5" in again.stdout and again.taken == len(typed)
    await asyncio.gather(old, return_exceptions=True)
    harness.driver._live.pop(sandbox.uid, None)
    fresh._live.pop(sandbox.uid).agent.close()


class Resumed(Terminal):
    taken = -1

    async def resumes(self, *, taken: int, terminal: bool, base: tuple[int, int] = (0, 0)) -> None:
        assert terminal
        self.taken = taken


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1"])
async def test_a_signal_right_after_the_start_is_not_lost(box: Box, name: str) -> None:
    for number in range(25):
        io = Recorder()
        io.order(name)
        ran = await run(*box, "sleep 300", io=io, timeout_s=HANG_S)
        assert ran.outcome.signal == name and not ran.outcome.timed_out, number


async def test_signals_right_after_many_starts_at_once_are_not_lost(box: Box) -> None:
    ios = [Recorder() for _ in range(16)]
    for io in ios:
        io.order("TERM")
    argv = ["sleep", "300"]
    done = await asyncio.gather(*(run(*box, argv, io=io, timeout_s=HANG_S) for io in ios))
    assert [ran.outcome.signal for ran in done] == ["TERM"] * 16


async def test_signal_zero_only_asks(box: Box) -> None:
    """(E35) Before the start and while it runs."""
    io = Recorder()
    for _ in range(3):
        io.order("0")
    work = asyncio.create_task(run(*box, "echo on; sleep 1; echo end", io=io))
    await io.started.wait()
    io.order("0")
    ran = await work
    assert (ran.code, ran.stdout) == (0, b"on\nend\n")
