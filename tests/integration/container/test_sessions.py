"""Sessions: what lives on between commands, what ends a command and what a shell. Every
test runs with busybox' sh and with bash: their shells are told to leave a text in
different ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.edge.drivers.base import Handle, Layer
from services.edge.drivers.container import ContainerDriver
from shared.errors import InvalidRequest
from tests.conformance.harness import HANG_S, SLEEPERS, Ran, Recorder, new_uid, run
from tests.integration.container.harness import ContainerHarness
from tests.integration.container.images import bash_layer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]


class Session:
    def __init__(self, driver: ContainerDriver, handle: Handle) -> None:
        self.driver, self.handle = driver, handle

    async def __call__(self, command: str, **changes: object) -> Ran:
        given = {"session": "s", "timeout_s": HANG_S, **changes}
        return await run(self.driver, self.handle, command, **given)


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    return bash_layer(tmp_path_factory.mktemp("bash"))


@pytest_asyncio.fixture(loop_scope="module", params=["sh", "bash"])
async def sandbox(
    harness: ContainerHarness, bash: Layer, request: pytest.FixtureRequest
) -> AsyncIterator[Handle]:
    layers = [harness.layer, bash] if request.param == "bash" else [harness.layer]
    handle = await harness.driver.start(harness.spec(uid=new_uid(), layers=layers))
    yield handle
    await harness.driver.stop(handle)


@pytest.fixture
def session(driver: ContainerDriver, sandbox: Handle) -> Session:
    return Session(driver, sandbox)


async def test_folder_variables_and_functions_live_on(session: Session) -> None:
    await session("cd /tmp; X=5; export Y=6; f() { echo f$X; }")
    ran = await session("pwd; f; sh -c 'echo $Y'; (exit 4)")
    assert (ran.code, ran.stdout) == (4, b"/tmp\nf5\n6\n")


async def test_here_documents_do_not_hang(session: Session) -> None:
    """(E09)"""
    ran = await session("cat <<'EOF' >/tmp/t\nhello $X\nEOF\ncat /tmp/t")
    assert (ran.code, ran.stdout) == (0, b"hello $X\n")


async def test_a_shell_that_ends_gives_its_code_and_the_next_command_a_fresh_one(
    session: Session,
) -> None:
    """(E11)"""
    await session("echo 'read x; sleep 2' >~/.bashrc; cp ~/.bashrc ~/.profile; X=1")
    ran = await session("exit 7")
    assert (ran.code, ran.outcome.session_ended) == (7, True)
    ran = await session("echo again$X")
    assert (ran.code, ran.stdout, ran.outcome.session_fresh) == (0, b"again\n", True)
    ran = await session("echo more")
    assert not ran.outcome.session_fresh and not ran.outcome.session_ended


async def test_commands_queue_in_order(session: Session) -> None:
    """(E29)"""
    done = await asyncio.gather(*(session(f"X={i}; sleep .02; echo $X") for i in range(20)))
    assert [r.stdout for r in done] == [b"%d\n" % i for i in range(20)]


NESTED = "g() { sleep 61; echo on; }; f() { while :; do g; done; }; f; echo after"
SPINNING = "f() { while :; do :; done; }; f; echo after"
READING = "mkfifo /tmp/never; read x </tmp/never; echo after"
INSIDE = "x=$(sleep 60 | cat); (sleep 60; echo sub); eval 'sleep 60'; echo after"
TRAPPED = "trap 'echo trap' INT; sleep 60; echo after"


@pytest.mark.parametrize(
    "command", ["setsid sleep 60 & sleep 60", NESTED, SPINNING, READING, "sleep 60 & wait", INSIDE]
)
async def test_a_time_limit_leaves_the_shell_and_its_state(session: Session, command: str) -> None:
    """(E01, E05) Whatever the text is in the middle of, all it started is dead."""
    await session("X=1; cd /tmp; h() { echo h$X; }; sleep 300 & echo $! >/tmp/kept")
    async with asyncio.timeout(HANG_S):
        ran = await session(command, timeout_s=0.15)
    assert ran.outcome.timed_out and not ran.outcome.session_ended
    assert ran.stdout == b""
    left = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 6[0-9] '"
    ran = await session(f"h; pwd; kill -0 $(cat kept) && echo lives; {left}")
    assert ran.stdout == b"h1\n/tmp\nlives\n0\n" and not ran.outcome.session_fresh


async def test_background_work_of_earlier_commands_goes_on_with_what_it_starts(
    session: Session,
) -> None:
    await session("(while :; do sleep 0.05; echo >>/tmp/beats; done) & X=1")
    assert (await session("setsid sleep 62 & sleep 62", timeout_s=0.15)).outcome.timed_out
    ran = await session("rm /tmp/beats; until test -s /tmp/beats; do sleep 0.05; done; echo $X")
    assert ran.stdout == b"1\n"


async def test_a_shell_that_does_not_let_go_ends_with_its_command(session: Session) -> None:
    await session("X=1")
    async with asyncio.timeout(HANG_S):
        ran = await session("trap '' 64; while :; do sleep 1; done", timeout_s=0.15)
    assert ran.outcome.timed_out and ran.outcome.session_ended
    ran = await session("echo fresh$X")
    assert (ran.stdout, ran.outcome.session_fresh) == (b"fresh\n", True)


def interrupted(session: Session, command: str, **changes: object) -> tuple[Recorder, asyncio.Task]:
    io = Recorder()
    return io, asyncio.ensure_future(session(command, io=io, **changes))


@pytest.mark.parametrize(
    "command", ["sleep 60; echo after", NESTED, SPINNING, READING, INSIDE, TRAPPED]
)
async def test_an_interrupt_ends_the_command_and_keeps_the_shell(
    session: Session, command: str
) -> None:
    await session("X=1; cd /tmp; sleep 300 &")
    io, work = interrupted(session, f"echo on; {command}")
    await io.started.wait()
    await asyncio.sleep(0.05)
    io.order("INT")
    ran = await asyncio.wait_for(work, HANG_S)
    assert (ran.code, ran.outcome.signal, ran.stdout) == (130, "INT", b"on\n")
    assert not ran.outcome.session_ended
    ran = await session(f"echo $X; pwd; {SLEEPERS}")
    assert (ran.stdout, ran.outcome.session_fresh) == (b"1\n/tmp\n1\n", False)


async def test_an_interrupt_right_after_the_start_is_not_lost(session: Session) -> None:
    await session("X=1")
    for number in range(20):
        io, work = interrupted(session, "sleep 60; sleep 60")
        await asyncio.sleep(number * 0.0005)
        io.order("INT")
        ran = await asyncio.wait_for(work, HANG_S)
        assert (ran.code, ran.outcome.session_ended) == (130, False), number
    assert (await session("echo $X")).stdout == b"1\n"


async def test_an_interrupt_from_inside_is_one_too(session: Session) -> None:
    await session("X=1")
    ran = await session("echo on; kill -INT $$; echo after")
    assert (ran.code, ran.outcome.signal, ran.stdout) == (130, "INT", b"on\n")
    ran = await session("sh -c 'kill -INT $$'; echo $?; echo $X")
    assert (ran.code, ran.stdout) == (0, b"130\n1\n")


async def test_a_program_may_handle_an_interrupt(session: Session) -> None:
    """The text is left when it has ended, with everything it still said."""
    handler = 'trap "sleep .3; echo cleaned; exit 3" INT'
    script = f"sh -c '{handler}; echo on; while :; do sleep .1; done'; echo after"
    io, work = interrupted(session, script)
    await io.started.wait()
    io.order("INT")
    ran = await asyncio.wait_for(work, HANG_S)
    assert (ran.code, ran.stdout) == (130, b"on\ncleaned\n")


async def test_an_interrupted_command_that_waits_for_its_turn_does_not_run(
    session: Session,
) -> None:
    first = asyncio.ensure_future(session("until [ -e /tmp/go ]; do sleep .05; done"))
    await asyncio.sleep(0.1)
    io, work = interrupted(session, "touch /tmp/ran")
    await asyncio.sleep(0.1)
    io.order("INT")
    assert (await asyncio.wait_for(work, HANG_S)).code == 130
    await run(session.driver, session.handle, ": >/tmp/go")
    assert (await first).code == 0
    assert (await session("test -e /tmp/ran")).code == 1


async def test_other_signals_reach_what_the_command_started(session: Session) -> None:
    """And neither the shell nor background work of earlier commands."""
    await session("X=1; sleep 300 &")
    io, work = interrupted(session, "sh -c 'echo on; exec sleep 60'; echo $?; sleep 0.1; echo end")
    await io.started.wait()
    io.order("TERM")
    ran = await asyncio.wait_for(work, HANG_S)
    assert (ran.code, ran.stdout) == (0, b"on\n143\nend\n")
    ran = await session(f"echo $X; {SLEEPERS}")
    assert ran.stdout == b"1\n1\n"


async def test_a_kill_ends_the_command_and_keeps_the_shell(session: Session) -> None:
    await session("X=1")
    io, work = interrupted(session, "trap '' INT TERM; echo on; setsid sleep 60 & sleep 60")
    await io.started.wait()
    io.order("KILL")
    ran = await asyncio.wait_for(work, HANG_S)
    assert (ran.code, ran.outcome.signal, ran.outcome.session_ended) == (137, "KILL", False)
    assert (await session(f"echo $X; {SLEEPERS}")).stdout == b"1\n0\n"


async def test_options_traps_and_open_files_live_on(session: Session) -> None:
    await session("set -u; trap 'echo bye' EXIT; exec 9>/tmp/lock; exec 3</etc/passwd; umask 077")
    ran = await session("echo x >&9; head -n1 <&3; umask; echo $-")
    assert ran.stdout.startswith(b"root:x:0:0:root:/root:/bin/sh\n0077\n")
    assert b"u" in ran.stdout.splitlines()[-1]
    ran = await session("cat /tmp/lock; exit 3")
    assert (ran.code, ran.stdout) == (3, b"x\nbye\n")


async def test_an_error_that_ends_a_shell_ends_this_one_and_is_told(session: Session) -> None:
    await session("X=1; set -e")
    ran = await session("false; echo never")
    assert (ran.code, ran.stdout, ran.outcome.session_ended) == (1, b"", True)
    ran = await session("echo $X$-")
    assert ran.outcome.session_fresh and b"e" not in ran.stdout


async def test_names_of_the_user_do_not_get_in_the_way(session: Session) -> None:
    await session("echo() { :; }; read() { :; }; set -x; alias cat=false")
    ran = await session("cd /tmp; pwd; (exit 6)")
    assert (ran.code, ran.stdout) == (6, b"/tmp\n")


async def test_a_cancelled_command_lets_those_behind_it_run(session: Session) -> None:
    first = asyncio.ensure_future(session("sleep 60"))
    await asyncio.sleep(0.1)
    second = asyncio.ensure_future(session("sleep 61"))
    third = asyncio.ensure_future(session("echo third"))
    await asyncio.sleep(0.1)
    second.cancel()
    first.cancel()
    assert (await third).stdout == b"third\n"
    await asyncio.gather(first, second, return_exceptions=True)


async def test_output_cannot_pose_as_an_end(session: Session) -> None:
    """Children inherit no channel, and a message of another process does not count."""
    ran = await session(
        'for fd in 7 8 10 11 12 13; do sh -c "echo 0 >&$fd" 2>/dev/null; done; '
        "echo 0 >&8; sleep 0.2; echo end; (exit 3)"
    )
    assert (ran.code, ran.stdout) == (3, b"end\n")


async def test_merged_output_shares_one_stream(session: Session) -> None:
    ran = await session("echo o; echo e >&2; echo o", merge=True)
    assert (ran.stdout, ran.stderr) == (b"o\ne\no\n", b"")
    ran = await session("echo o; echo e >&2")
    assert (ran.stdout, ran.stderr) == (b"o\n", b"e\n")


async def test_sessions_are_apart(session: Session) -> None:
    await session("X=1", session="one")
    assert (await session("echo x$X", session="two")).stdout == b"x\n"


async def test_a_session_belongs_to_its_user(session: Session) -> None:
    ran = await session("id -un; echo $HOME", user="agent")
    assert ran.stdout == b"agent\n/home/agent\n"
    with pytest.raises(InvalidRequest) as caught:
        await session("id -un", user="root")
    assert caught.value.field == "user"


async def test_a_session_takes_no_argv(session: Session, sandbox: Handle) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await run(session.driver, sandbox, ["true"], session="s")
    assert caught.value.field == "session"
