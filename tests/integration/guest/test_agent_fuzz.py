"""The agent under changed conversations: in one process with its surroundings replaced by
the input, and as the real thing in a root of its own. Both are checked builds (ASan,
UBSan); both begin with the same seeds every time. ``make fuzz`` really searches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.edge.agent import wire
from services.edge.agent.client import AgentClient
from services.edge.agent.commands import run_command
from services.edge.agent.handshake import CgroupFds
from services.edge.agent.wire import Frame, FrameDecoder, Msg
from services.edge.drivers.base import ExecSpec
from tests.conformance.harness import Recorder
from tests.fuzz import seeds
from tests.integration.container.images import HELLO, compiled

GUEST = Path(__file__).parents[3] / "guest"
COPIES = 60  # changed copies of each seed, in one process
CONVERSATIONS = 200  # with the real agent
GROWTH_KB = 16_384  # of a checked build, whose allocator keeps what was freed for a while
SETTLE_S = 60.0


@pytest.fixture(scope="module")
def builds() -> Path:
    """Where the checked builds are."""
    done = subprocess.run(["make", "-s", "-C", GUEST, "replay"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return GUEST / "build"


def test_changed_conversations_break_nothing(builds: Path, tmp_path: Path) -> None:
    """No access outside of memory, no leak of memory or descriptors, nothing malformed
    said, no signal to everybody, and bounded answers."""
    files = seeds.write(tmp_path / "seeds")
    argv = [builds / "replay-channel", str(COPIES), *files]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"{len(files)} inputs, {COPIES} changed copies" in done.stdout


@dataclass
class Jail:
    """A real agent, first process of namespaces of its own, in a root with one program."""

    root: Path
    process: subprocess.Popen[bytes]

    @property
    def socket(self) -> Path:
        return self.root / "run" / "agent.sock"

    @property
    def pid(self) -> int:
        """The agent's, as seen from here."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_kb(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]

    def reports(self) -> str:
        """What the checks of any of its processes found."""
        return "".join(p.read_text() for p in (self.root / "log").iterdir())


START = """
mount -t proc proc {root}/proc
mount -t devpts -o newinstance,ptmxmode=666 devpts {root}/dev/pts
exec chroot {root} /aether /run/agent.sock gen
"""


@pytest.fixture
def jail(builds: Path, tmp_path: Path) -> Iterator[Jail]:
    root = tmp_path / "root"
    for name in ("proc", "dev/pts", "run", "log", "tmp", "bin", "etc"):
        (root / name).mkdir(parents=True)
    for name in ("log", "tmp"):
        (root / name).chmod(0o777)
    os.mknod(root / "dev/null", 0o666 | 0o020000, os.makedev(1, 3))
    compiled(HELLO, root / "bin/hello", "-static")
    with_libraries(builds / "aether-checked", root / "aether")
    checks = "log_path=/log/found:quarantine_size_mb=1:detect_leaks=0:allocator_may_return_null=1"
    process = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--kill-child",
         "sh", "-ec", START.format(root=root)],
        env={"PATH": os.environ["PATH"], "ASAN_OPTIONS": checks, "UBSAN_OPTIONS": checks},
    )  # fmt: skip
    made = Jail(root, process)
    try:
        until(made.socket.exists)
        yield made
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def with_libraries(program: Path, target: Path) -> None:
    """Copies a program, and beside it what the loader needs for it."""
    shutil.copy2(program, target)
    needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"(/\S+)", needed):
        place = target.parent / library.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, place)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SETTLE_S
    while not holds():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def said(conversation: bytes) -> list[Frame]:
    """The frames that the edge says in a seed."""
    frames, at = [], 0
    decoder = FrameDecoder()
    while at < len(conversation):
        kind, size = conversation[at], int.from_bytes(conversation[at + 1 : at + 3], "little")
        if kind == seeds.Step.SAY:
            with contextlib.suppress(wire.ProtocolError):
                frames += decoder.feed(conversation[at + 3 : at + 3 + size])
        at += 3 + size
    return frames


def changed(rng: random.Random, frames: list[Frame]) -> bytes:
    """A copy with a few changes: mostly still frames, sometimes not."""
    out = bytearray()
    for type_, op_id, payload in frames:
        body = bytearray(payload)
        for _ in range(rng.choice([0, 0, 1, 4])):
            if body:
                at, random_byte = rng.randrange(len(body)), rng.randrange(256)
                body[at] = rng.choice([0, 1, 127, 128, 255, random_byte])
        if rng.random() < 0.1:
            body = body[: rng.randrange(len(body) + 1)] * rng.choice([1, 2, 40])
        if rng.random() < 0.1:
            type_ = rng.randrange(1, 16)
        out += wire.frame(type_, rng.choice([op_id, op_id, rng.randrange(12)]), bytes(body))
    if rng.random() < 0.1 and out:
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def converse(jail: Jail, rng: random.Random, data: bytes, *, reads: bool) -> None:
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.settimeout(0.2)
        sock.connect(str(jail.socket))
        while data:
            size = rng.randrange(1, max(2, len(data)))
            sock.sendall(data[:size])
            data = data[size:]
        if reads:
            sock.settimeout(0.002)
            for _ in range(20):
                if not sock.recv(65536):
                    break


async def good_client(jail: Jail) -> None:
    """Ends what is left, and is served as if nothing had been."""
    client = await AgentClient.connect(jail.socket, generation="gen", cgroups=CgroupFds())
    for op in await client.list():
        client._send(Msg.ATTACH, op.id)
        client._send(Msg.KILL, op.id)
        client._send(Msg.ACK, op.id)
    io = Recorder()
    spec = ExecSpec("good", argv=["/bin/hello", "here"], timeout_s=60)
    outcome = await run_command(client, spec, io, defaults=seeds.DEFAULTS)
    assert (outcome.exit_code, io.stdout) == (2, b"here\n")
    while any(not op.done for op in await client.list()):
        await asyncio.sleep(0.05)
    for op in await client.list():
        client._send(Msg.ACK, op.id)
    await client.list()
    client.close()


def test_the_real_agent_survives_changed_conversations(jail: Jail) -> None:
    """It lives, its checks found nothing, a good client is served, and neither
    descriptors nor memory grew."""
    rng = random.Random(11)
    conversations = [frames for c in seeds.conversations().values() if (frames := said(c))]

    def storm(rounds: int) -> None:
        for _ in range(rounds):
            data = changed(rng, rng.choice(conversations))
            converse(jail, rng, data, reads=rng.random() < 0.5)
        asyncio.run(asyncio.wait_for(good_client(jail), SETTLE_S))

    storm(CONVERSATIONS // 4)  # buffers, nests and the allocator are there after the first
    before, size_kb, pid = jail.descriptors(), jail.resident_kb(), jail.pid
    storm(CONVERSATIONS)
    until(lambda: jail.descriptors() <= before + 2)
    assert jail.resident_kb() < size_kb + GROWTH_KB
    assert jail.pid == pid and jail.process.poll() is None
    assert not jail.reports(), jail.reports()[:6000]
