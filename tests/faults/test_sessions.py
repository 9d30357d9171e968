"""Faults of sessions, seen by a client of the whole system on a real container."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import DSecClient, DSecError, ExecResult, InvalidRequest, Sandbox
from tests.e2e.conftest import until
from tests.faults.conftest import CREATE_S, HANG_S, container_args

pytestmark = [pytest.mark.docker]


async def test_a_here_document_ends(box: Sandbox) -> None:
    """(E09) And what else a shell that reads its commands would choke on."""
    shell = box.session("here")
    ran = await shell.run("cat <<'EOF' >/tmp/t\nhello $X\nEOF", timeout=HANG_S)
    assert ran.ok and await box.files.read("/tmp/t") == b"hello $X\n"
    for text, said in (
        ("read x; echo \"x=$x\"", b"x=\n"),
        ("cat; echo end", b"end\n"),
        ("echo a # '", b"a\n"),
        ("echo a \\\n b", b"a b\n"),
        ("# nothing", b""),
        ("", b""),
        ("echo \"two\nlines\"; echo '\x01\x1a\x04\x03'", b"two\nlines\n\x01\x1a\x04\x03\n"),
    ):
        ran = await shell.run(text, timeout=HANG_S)
        assert (ran.stdout, ran.exit_code, ran.timed_out) == (said, 0, False), text
    ran = await shell.run("if true; then echo 'open", timeout=HANG_S)
    assert ran.exit_code == 2 and ran.stderr, "half a command is a syntax error"


async def test_a_shell_reads_no_start_up_files_and_its_end_is_told(box: Sandbox) -> None:
    """(E11)"""
    for name in (".bashrc", ".profile", ".zshenv", ".bash_profile"):
        await box.files.write(f"/root/{name}", "echo noise; read x; : >/tmp/start-up\n")
    shell = box.session("rc", env={"ENV": "/root/.profile", "BASH_ENV": "/root/.bashrc"})
    ran = await shell.run("X=1; echo ok")
    assert (ran.stdout, ran.session_fresh, ran.session_ended) == (b"ok\n", True, False)
    ran = await shell.run("exit 7")
    assert (ran.exit_code, ran.session_fresh, ran.session_ended) == (7, False, True)
    ran = await shell.run("echo again$X")
    assert (ran.stdout, ran.session_fresh) == (b"again\n", True)
    ran = await shell.run("kill -9 $$")
    assert (ran.exit_code, ran.signal, ran.session_ended) == (137, "KILL", True)
    ran = await shell.run("exec sh -c 'exit 5'")
    assert (ran.exit_code, ran.session_ended) == (5, True)
    assert (await shell.run("echo last")).session_fresh
    assert not await box.files.exists("/tmp/start-up")


async def test_a_shell_that_dies_while_nothing_runs_is_noticed(box: Sandbox) -> None:
    """(E11)"""
    shell = box.session("idle")
    ran = await shell.run("(until [ -e /tmp/die ]; do sleep .05; done; kill -9 $$) & echo $$")
    await box.files.write("/tmp/die", b"")

    async def dead() -> bool:
        return not await box.files.exists(f"/proc/{int(ran.stdout)}")

    await until(dead, what="the shell is dead")
    again = await shell.run("echo $$", timeout=HANG_S)
    assert again.session_fresh and again.stdout != ran.stdout


async def test_commands_of_one_session_queue_and_others_run_at_once(box: Sandbox) -> None:
    """(E29)"""
    shell = box.session("queue")
    calls = [shell.run(f"X={i}; sleep .02; echo $X; echo $X >&2") for i in range(20)]
    done = await asyncio.gather(*calls)
    assert [(r.stdout, r.stderr) for r in done] == [(b"%d\n" % i, b"%d\n" % i) for i in range(20)]
    for count, run in ((20, _alone), (8, _apart)):
        done = await asyncio.gather(*(run(box, i, _meet(i, count)) for i in range(count)))
        assert [r.stdout for r in done] == [b"%d\n" % i for i in range(count)]


def _meet(number: int, count: int) -> str:
    """A command that ends when so many of them have begun."""
    here = f"/tmp/meet{count}"
    all_there = f"[ $(ls {here} | wc -l) = {count} ]"
    return (
        f"X={number}; mkdir -p {here}; : >{here}/$X; until {all_there}; do sleep .05; done; echo $X"
    )


async def _alone(box: Sandbox, _number: int, command: str) -> ExecResult:
    return await box.exec(command, timeout=HANG_S)


async def _apart(box: Sandbox, number: int, command: str) -> ExecResult:
    return await box.session(f"apart{number}").run(command, timeout=HANG_S)


async def test_a_broken_call_breaks_no_other_of_its_session(box: Sandbox) -> None:
    """(E29) Limits, cancels and errors in between: order and state stay."""
    shell = box.session("broken")
    await shell.run("X=0")
    calls = [asyncio.ensure_future(shell.run("X=$((X+1)); echo $X"))]
    calls.append(asyncio.ensure_future(shell.run("sleep 60", timeout=0.2)))
    gone = asyncio.ensure_future(shell.run("sleep 61"))
    calls.append(asyncio.ensure_future(shell.run("X=$((X+1)); echo $X; nonsense")))
    calls.append(asyncio.ensure_future(shell.run("X=$((X+1)); echo $X")))
    await asyncio.sleep(0.4)
    gone.cancel()
    done = await asyncio.gather(*calls)
    assert [r.stdout for r in done] == [b"1\n", b"", b"2\n", b"3\n"]
    assert [r.exit_code for r in done] == [0, None, 127, 0]
    assert not any(r.session_fresh for r in done)


async def test_the_time_of_a_command_begins_with_its_turn(box: Sandbox) -> None:
    """(E29, E31) To wait in a queue is no fault of the command's."""
    shell = box.session("turn")
    first = asyncio.ensure_future(shell.run(": >/tmp/turn; sleep 3"))
    await until(lambda: box.files.exists("/tmp/turn"), what="the first one runs")
    second = await shell.run("sleep 0.2; echo done", timeout=2.5)
    assert (second.stdout, second.timed_out) == (b"done\n", False)
    assert (await first).ok


async def test_a_session_has_one_user_and_no_input(box: Sandbox) -> None:
    """(E33) Its environment is that user's; nobody else gets in by its name."""
    shell = box.session("mine", user="agent", cwd="/tmp", env={"A": "1 2"})
    ran = await shell.run('id -un; id -G; echo "$HOME $A"; pwd; umask; touch mine')
    assert ran.text == "agent\n1000 2000\n/home/agent 1 2\n/tmp\n0022\n"
    assert (await box.files.stat("/tmp/mine")).uid == 1000
    with pytest.raises(InvalidRequest) as caught:
        await box.run_shell("id", session="mine", user="root")
    assert caught.value.field == "user"
    with pytest.raises(InvalidRequest) as caught:
        await (await box.spawn("cat", session="mine", stdin=True)).wait()
    assert caught.value.field == "stdin"
    assert (await box.run_shell("id -un", session="mine", user="agent")).text == "agent\n"


async def test_a_session_is_as_clean_inside_as_a_single_command(box: Sandbox) -> None:
    """(E26, E28) Nothing of the caller's terminal or of the shell's own machinery shows;
    children that ended use up no process numbers."""
    shell = box.session("clean")
    ran = await shell.run("env; echo; ls /proc/self/fd | wc -l", merge=True)
    variables, _, _ = ran.text.partition("\n\n")
    names = {line.partition("=")[0] for line in variables.splitlines()}
    assert {"TERM", "PAGER", "HOME", "PATH"} <= names
    assert not names & {"COLUMNS", "LINES"} and not [n for n in names if "dsec" in n.lower()]
    assert "\nTERM=dumb\n" in f"\n{variables}\n" and "\nPAGER=cat\n" in f"\n{variables}\n"
    for _ in range(70):
        await shell.run("sleep 0.01 & (sleep 0.01 &) ; true", check=True)

    async def reaped() -> bool:
        await shell.run("sleep 0", check=True)  # a shell reaps with its next child
        ran = await box.exec("cat /proc/[0-9]*/status | grep -c 'State:.*zombie'")
        return int(ran.text) <= 10

    await until(reaped, what="most of 140 children are gone")
    ran = await shell.run("(exit 5) & P=$!; true")
    assert (await shell.run("wait $P")).exit_code == 5


async def test_sessions_have_a_bound_and_what_is_closed_makes_room(client: DSecClient) -> None:
    async with await client.run_container(container_args(), timeout=CREATE_S) as box:
        shells = [box.session(f"s{i}") for i in range(32)]
        for shell in shells:
            await shell.run("true", check=True)
        with pytest.raises(DSecError) as caught:
            await box.run_shell("true", session="one more")
        assert (caught.value.code, caught.value.field) == ("invalid_request", "session")
        await shells[7].close()
        assert (await box.run_shell("true", session="one more")).session_fresh
