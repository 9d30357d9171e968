"""Faults of a node: what leaks with time, layers without end, secrets. On the whole
system with real containers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path

import pytest

from libdsec import DSecClient, Sandbox
from tests.e2e.conftest import until
from tests.faults.conftest import CREATE_S, World, container_args, tool
from tests.faults.ledger import edge_process, held, measure
from tests.unit.services.imagesvc.tars import member, saved_image, tar_bytes

pytestmark = [pytest.mark.docker]

LAYERS = 120
ROUNDS, AT_ONCE = 25, 8
SLACK = 2
READ_BYTES = 16 << 20


async def cycle(client: DSecClient, count: int) -> None:
    """Create, use, end: by a stop, or by the death of its first process."""
    boxes = await client.create_many(container_args(), n=count, timeout=CREATE_S)
    for box in boxes:
        assert isinstance(box, Sandbox), box
    await asyncio.gather(*(box.exec("sleep 100 & echo x >/x") for box in boxes))  # type: ignore[union-attr]
    await asyncio.gather(*(box.files.write("/y", b"y" * 9000) for box in boxes))  # type: ignore[union-attr]
    await client.stop_many(boxes)  # type: ignore[arg-type]


async def at_rest(world: World) -> dict[str, int]:
    """The node's numbers once they do not change."""
    last: dict[str, int] = {}

    async def same() -> bool:
        nonlocal last
        before, last = last, await asyncio.to_thread(measure, world)
        await asyncio.sleep(0.4)
        return before == last

    await until(same, what="a node at rest")
    return last


@pytest.mark.slow
async def test_two_hundred_sandboxes_leave_the_node_as_it_was(
    world: World, client: DSecClient
) -> None:
    """(T01)"""
    for _ in range(4):  # threads, connections and pools come with the first load
        await cycle(client, 2 * AT_ONCE)
    before = await at_rest(world)
    memory_before = edge_process(world).memory_info().rss
    for _ in range(ROUNDS):
        await cycle(client, AT_ONCE)

    async def as_before() -> bool:  # the engine may still be taking leave of some
        after = await asyncio.to_thread(measure, world)
        grown.clear()
        grown.update({k: (before[k], after[k]) for k in before if after[k] - before[k] > SLACK})
        return not grown

    grown: dict[str, tuple[int, int]] = {}
    await until(as_before, what=f"a node as it was, but {grown}")
    assert edge_process(world).memory_info().rss - memory_before < 16 << 20


async def test_a_hundred_and_twenty_layers_are_all_there(world: World, client: DSecClient) -> None:
    """(I07) One page of mount options holds about 70 of them."""
    from tests.integration.container.images import busybox_tree

    scratch = world.images / "many"
    scratch.mkdir()
    tree = busybox_tree(scratch)
    tool("tar", "-cf", scratch / "base.tar", "-C", tree, ".")
    layers = [(scratch / "base.tar").read_bytes()]
    layers += [tar_bytes([member(f"layer{n}", b"%d" % n)]) for n in range(1, LAYERS)]
    archive = scratch / "many.tar"
    archive.write_bytes(saved_image(layers))
    image = await client.images.create("many:1", path=str(archive))
    assert len(image.layers) == LAYERS
    args = container_args(container_image="many:1")
    async with await client.run_container(args, timeout=CREATE_S) as box:
        script = "ls -d /layer* | wc -l; cat /layer1 /layer119; mkdir /w && echo ok >/w/f"
        ran = await box.exec(script)
        assert (ran.exit_code, ran.text) == (0, f"{LAYERS - 1}\n1119")
        assert await box.files.read("/w/f") == b"ok\n"
        pid = min(held(world, box.uid).pids)
        mounts = Path(f"/proc/{pid}/mountinfo").read_text()
        assert mounts.count("lowerdir+=") == LAYERS + 1  # what the node lays below them all


async def test_a_layer_that_nothing_may_change_is_mounted_without_a_loop_device(
    world: World, client: DSecClient
) -> None:
    """(I19) Immutable, and readable by its owner alone."""
    tree = world.images / "still"
    (tree / "bin").mkdir(parents=True)
    small = await client.images.get("small:1")
    (tree / "still").write_bytes(os.urandom(70_000))
    image = await client.images.create("still:1", path=str(tree), kind="toolkit", prefix="/still")
    known = {layer.digest for layer in small.layers}
    digest = next(d.digest for d in image.layers if d.digest not in known)
    name = digest.rpartition(":")[2].removeprefix("sha256-")
    files = [p for p in (world.system.state_dir / "store").rglob("*") if name in str(p)]
    blobs = [p for p in files if p.is_file()]
    assert blobs
    said = _kernel_log()
    modes = {blob: stat.S_IMODE(blob.stat().st_mode) for blob in blobs}
    for blob in blobs:
        blob.chmod(0o400)
        tool("chattr", "+i", blob)
    try:
        args = container_args(container_image=None, layers=["small:1", "still:1"])
        async with await client.run_container(args, timeout=CREATE_S) as box:
            assert len(await box.files.read("/still/still")) == 70_000
            ran = await box.exec("echo changed >/still/still; cat /still/still")
            assert ran.text == "changed\n"
            behind = tool("losetup", "--list", "--noheadings", "--output", "BACK-FILE")
            assert str(world.system.state_dir) not in behind
    finally:
        for blob in blobs:
            tool("chattr", "-i", blob)
            blob.chmod(modes[blob])
    assert not [line for line in _kernel_log() - said if "open blockdev" in line]


def _kernel_log() -> set[str]:
    return set(tool("dmesg").splitlines())


PEEK = """n=0
for d in /proc/[0-9]*; do
  [ "$(cat $d/comm 2>/dev/null)" = aether ] || continue
  n=$((n+1))
  for f in environ mem maps smaps auxv stack syscall; do
    head -c1 $d/$f 2>/dev/null | grep -q . && echo readable $d/$f
  done
  readlink $d/cwd $d/root $d/exe
  for f in $d/fd/* $d/map_files/*; do
    readlink $f
    [ -p $f ] || head -c1 $f 2>/dev/null | grep -q . && echo readable $f
  done
done
ls -d /run/dsec /newroot /aether 2>/dev/null
find / -xdev \\( -type s -o -name '*.sock' \\) 2>/dev/null
[ $n -ge 1 ] && echo looked
"""


@pytest.mark.parametrize("user", ["root", "nobody", "agent"])
async def test_nothing_of_the_agent_can_be_read_from_inside(
    world: World, client: DSecClient, user: str
) -> None:
    """(S06) No socket, memory, environment or descriptor; no key, no broker's address."""
    access = json.loads((world.system.state_dir / "access.json").read_text())
    env = {"MINE": "canary-s06"}
    async with await client.run_container(container_args(env=env), timeout=CREATE_S) as box:
        ran = await box.exec("sh", "-c", PEEK, user=user)
        assert ran.text == "looked\n", ran.text
        look = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/mounts; env"
        seen = (await box.exec("sh", "-c", f"({look}) 2>/dev/null", user=user)).stdout
        assert b"canary-s06" in seen, "its own variables are its own"
        for secret in (access["admin_key"], *access["node_keys"].values()):
            assert secret.encode() not in seen
        broker = world.system.url.removeprefix("nats://").encode()
        for word in (b"NATS", b"nats://", broker, b"DSEC", b"/run/dsec", b"agent.sock"):
            assert word not in seen, word
        for call in ("kill -STOP 1", "kill -9 1", "echo 0 >/proc/1/oom_score_adj"):
            await box.exec("sh", "-c", f"{call} 2>/dev/null", user=user)
        assert (await box.exec("echo", "alive")).text == "alive\n"


async def test_secrets_of_a_sandbox_show_nowhere_on_the_host(
    world: World, client: DSecClient
) -> None:
    """(S07) Command lines, logs, the record of verbs, files that others may read."""
    kinds = ("env", "call", "input", "file", "output")
    canaries = [f"canary-s07-{kind}-{os.getpid()}" for kind in kinds]
    env, call, given, content, shown = canaries
    begun = time.time() - 1.0
    args = container_args(env={"SECRET": env}, labels={"test": "s07"})
    async with await client.run_container(args, timeout=CREATE_S) as box:
        halves = f"printf %s {shown[:8]}; echo {shown[8:]}"
        script = f"read x; echo $SECRET $OTHER $x; {halves}; sleep 1"
        running = asyncio.create_task(box.exec(script, env={"OTHER": call}, stdin=f"{given}\n"))
        await box.files.write("/secret", content)
        await box.run_shell(f"export S={call}")
        await asyncio.sleep(0.3)
        lines = _host_command_lines()
        result = await running
        assert result.text.split() == [env, call, given, shown]
        with pytest.raises(Exception):  # noqa: B017, PT011 - errors are logged too
            await box.exec("true", env={"A=B": call})
        entries = [e async for e in client.audit.list(target=box.uid)]
        entries += [e async for e in client.audit.list()]
        assert entries
    await asyncio.sleep(1.0)  # records are written in batches
    told = [json.dumps(entry.record, default=str) for entry in entries]
    told += [log.read_text(errors="replace") for log in world.system.logs.values()]
    for canary in canaries:
        outside = [line for line in lines if canary in line]
        assert not outside, "on a command line"
        assert not [text for text in told if canary in text]
        assert not _holding(canary, begun)
    with tempfile.NamedTemporaryFile("w", suffix=canaries[0]) as left:
        left.write(canaries[0])
        left.flush()
        os.fchmod(left.fileno(), 0o644)
        assert _holding(canaries[0], begun) == [left.name], "one that was left would be found"


def _host_command_lines() -> list[str]:
    found = []
    inside = os.readlink("/proc/self/ns/pid")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") != inside:
                continue  # a sandbox's own processes
            found.append(Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def _holding(word: str, since: float) -> list[str]:
    """Files changed ``since`` (seconds) that hold ``word`` where any user may read them: what
    is in the node's own folders is for their owner alone (the next test)."""
    found = []
    for top in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/log"):
        for root, folders, names in os.walk(top):
            folders[:] = [f for f in folders if _open(Path(root, f), 0o001)]
            paths = (Path(root, name) for name in names)
            found += [str(p) for p in paths if _open(p, 0o004) and _holds(p, word, since)]
    return found


def _open(path: Path, mode: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(path.lstat().st_mode & mode)
    return False


def _holds(path: Path, word: str, since: float) -> bool:
    with contextlib.suppress(OSError):
        about = path.lstat()
        plain = stat.S_ISREG(about.st_mode) and about.st_size <= READ_BYTES
        return plain and about.st_mtime >= since and word.encode() in path.read_bytes()
    return False


async def test_what_the_node_keeps_is_for_its_owner_alone(world: World) -> None:
    """(S07) The journal holds specs, with the variables in them."""
    for path in (world.system.state_dir, world.node_dir):
        assert path.stat().st_mode & 0o077 == 0, path
    journals = list(world.node_dir.glob("journal.db*"))
    assert journals
    for path in journals:
        assert path.stat().st_mode & 0o077 == 0, path
