"""The synchronous face on a real server, driven from threads, loops and scripts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from libdsec import sync
from tests.integration.libdsec.peer import Peer

pytestmark = pytest.mark.integration

FAKE = sync.DSecRunArgs(backend="fake")


@pytest.fixture
def options(peer: Peer) -> dict[str, str]:
    return peer.options()


async def off_loop(work):
    """The peer lives on this loop: the blocking code runs in a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def test_all_kinds_of_calls(peer: Peer, options):
    def work():
        with sync.DSecClient(**options) as client:
            sandbox = client.create(FAKE, timeout=60)
            assert isinstance(sandbox, sync.Sandbox)
            assert sandbox.files is sandbox.files
            assert sandbox.exec("echo hi").text == "hi\n"
            assert sandbox.files.write("/x", "y") == 1
            assert sandbox.files.read("/x", text=True) == "y"
            process = sandbox.spawn("cat")
            process.write("one\ntwo\n")
            process.close_stdin()
            assert list(process.stdout.lines()) == ["one", "two"]
            assert process.wait().ok
            assert [s.id for s in client.list()] == [sandbox.id]
            many = client.create_many([FAKE, FAKE], timeout=60)
            assert set(client.stop_many(many).values()) == {"stopped"}
            with pytest.raises(FileNotFoundError):
                sandbox.files.read("/no")
            assert repr(sandbox).startswith("Sandbox(")

    await off_loop(work)
    assert peer.live() == []


async def test_from_many_threads(options):
    def work():
        with sync.DSecClient(**options) as client, ThreadPoolExecutor(8) as pool:
            sandbox = client.create(FAKE, timeout=60)
            results = pool.map(lambda i: sandbox.exec(f"echo {i}").text, range(40))
            assert list(results) == [f"{i}\n" for i in range(40)]

    await off_loop(work)


async def test_inside_a_running_loop(options):
    """As in a notebook: this thread has a loop of its own that is running."""

    def work():
        async def cell():
            with sync.DSecClient(**options) as client:
                return client.create(FAKE, timeout=60).exec("echo nb").text

        return asyncio.run(cell())

    assert await off_loop(work) == "nb\n"


async def test_calls_from_its_own_callback_are_refused(options):
    failures: list[BaseException] = []

    def work():
        with sync.DSecClient(**options) as client:
            sandbox = client.create(FAKE, timeout=60)

            def on_output(_name, _data):
                try:
                    sandbox.exec("true")
                except RuntimeError as exc:
                    failures.append(exc)

            sandbox.exec("echo x", on_output=on_output)

    await off_loop(work)
    assert len(failures) == 1


SCRIPT = """
import sys
from libdsec.sync import DSecClient, DSecRunArgs
client = DSecClient(*sys.argv[1:4]).open()
sandbox = client.create(DSecRunArgs(backend="fake"), timeout=60)
print(sandbox.exec("echo made").text, end="", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "sandbox.spawn('sleep 60')"])
async def test_a_script_that_forgets_to_close_ends_and_leaves_nothing(
    peer: Peer, options, end: str
):
    argv = [sys.executable, "-c", SCRIPT.format(end=end), *options.values()]
    done = await off_loop(
        lambda: subprocess.run(argv, capture_output=True, text=True, timeout=120)
    )
    assert done.stdout == "made\n", done.stderr
    assert done.stderr == ""
    assert peer.live() == []


async def test_an_interrupt_cancels_the_call(peer: Peer, options):
    script = SCRIPT.format(end="""
import os, signal, threading
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    sandbox.exec("sleep 60")
except KeyboardInterrupt:
    print("interrupted")
client.close()
""")
    argv = [sys.executable, "-c", script, *options.values()]
    done = await off_loop(
        lambda: subprocess.run(argv, capture_output=True, text=True, timeout=120)
    )
    assert done.stdout == "made\ninterrupted\n", done.stderr
    assert peer.live() == []


def test_the_loop_is_not_the_callers():
    from libdsec._portal import portal

    assert portal()._thread is not threading.current_thread()
