"""Sessions: what lives on between commands, and what ends a shell."""

from __future__ import annotations

import asyncio

import pytest

from services.edge.drivers.base import Handle
from services.edge.drivers.container import ContainerDriver
from shared.errors import InvalidRequest
from tests.conformance.harness import Ran, run

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]


class Session:
    def __init__(self, driver: ContainerDriver, handle: Handle) -> None:
        self.driver, self.handle = driver, handle

    async def __call__(self, command: str, **changes: object) -> Ran:
        given = {"session": "s", "timeout_s": 20, **changes}
        return await run(self.driver, self.handle, command, **given)


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


async def test_a_time_limit_takes_the_shell_with_it(session: Session) -> None:
    await session("X=1")
    ran = await session("setsid sleep 60 & sleep 60", timeout_s=0.3)
    assert ran.outcome.timed_out and ran.outcome.session_ended
    ran = await session("echo fresh$X; grep -qx sleep /proc/[0-9]*/comm")
    assert (ran.code, ran.stdout) == (1, b"fresh\n")


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
