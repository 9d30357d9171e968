"""Captures of real sandboxes: one moment, exact, and what lies upon them."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path

import pytest

from schemas.control import UploadTarget
from services.edge.drivers.base import Handle, Layer
from services.edge.drivers.container import ContainerDriver, capturing
from services.edge.machine import freezing
from services.edge.snapshots import packing, scrub
from shared.blobs.layout import DATA_NAME, META_NAME
from shared.errors import CapacityExhausted, NotFound, SandboxDied
from tests.conformance.harness import HANG_S, new_uid, run, until
from tests.integration.container.harness import ContainerHarness

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]


async def captured_layer(
    driver: ContainerDriver, handle: Handle, folder: Path, *, rules: tuple[scrub.Rule, ...] = ()
) -> tuple[Layer, packing.Packed]:
    """What the sandbox changed as a layer in ``folder``, packed as the edge does."""
    captured = await driver.capture(handle, new_uid())
    folder.mkdir()
    try:
        packed = await asyncio.to_thread(
            lambda: packing.pack(
                [Path(f) for f in captured.folders], UploadTarget(folder=str(folder)),
                leave_out=packing.Scrub(rules), scratch=folder, tick=lambda _n: None,
            )
        )  # fmt: skip
    finally:
        await driver.release(captured.id)
    data = str(folder / DATA_NAME) if packed.manifest.data_bytes else None
    return Layer(packed.manifest.digest, str(folder / META_NAME), data), packed


LISTING = (
    "cd / && find . -xdev ! -path './proc*' ! -path './sys*' ! -path './dev*' ! -path './bin/*' "
    "| sort | while read -r f; do stat -c '%n %f %u %g %h %t %T' \"$f\"; "
    "[ -d \"$f\" ] || stat -c %s \"$f\"; [ -L \"$f\" ] && readlink \"$f\"; "
    "[ -f \"$f\" ] && md5sum < \"$f\"; done 2>/dev/null"
)


async def test_a_restored_sandbox_is_exactly_the_packed_one(
    harness: ContainerHarness, sandbox: Handle, tmp_path: Path
) -> None:
    """(L24) What was there is there, what came later is not, what was deleted is not,
    and what was deleted later is back."""
    driver = harness.driver
    script = (
        "mkdir -p /data/dir && echo a > /data/a && ln /data/a /data/dir/b && ln -s ../a /data/l && "
        "mkfifo /data/pipe && chmod 4711 /data/a && chown 1000:2000 /data/dir && "
        "dd if=/dev/zero of=/data/sparse bs=1 count=1 seek=9000000 2>/dev/null && "
        "rm /etc/group && rm -r /var && mkdir /var && echo new > /var/fresh && "
        "echo changed >> /etc/passwd && head -c 3000000 /dev/urandom > /data/large"
    )
    assert (await run(driver, sandbox, script)).outcome.exit_code == 0
    before = (await run(driver, sandbox, LISTING)).stdout
    layer, _ = await captured_layer(driver, sandbox, tmp_path / "layer")
    after = "echo b > /data/later; rm /data/a; rm -r /data/dir"
    assert (await run(driver, sandbox, after)).outcome.exit_code == 0
    restored = await driver.start(harness.spec(uid=new_uid(), layers=[harness.layer, layer]))
    try:
        found = (await run(driver, restored, LISTING)).stdout
        assert found.splitlines() == before.splitlines()
    finally:
        await driver.stop(restored)
    assert (await run(driver, sandbox, "ls /data/later; ls /data/a 2>&1 | wc -l")).stdout.split()[
        0
    ] == b"/data/later"


async def test_a_capture_is_one_moment(
    harness: ContainerHarness, sandbox: Handle, tmp_path: Path
) -> None:
    """Two files that a busy process writes in turn never differ by more than one turn,
    whatever the passes before saw; and the process goes on."""
    driver = harness.driver
    loop = "i=0; while :; do i=$((i+1)); echo $i > /one; echo $i > /two; done"
    task = asyncio.ensure_future(run(driver, sandbox, loop))
    try:
        await run(driver, sandbox, "until [ -e /two ]; do sleep 0.02; done", timeout_s=HANG_S)
        for number in range(3):
            captured = await driver.capture(sandbox, new_uid())
            texts = [(Path(captured.folders[0]) / n).read_text() for n in ("one", "two")]
            one, two = (int(text or "-1") for text in texts)
            assert one < 0 or two < 0 or one - two in (0, 1), number
            await driver.release(captured.id)
        moved = 'a=$(cat /one); while [ "$a" = "$(cat /one)" ]; do sleep .02; done; echo on'
        ran = await run(driver, sandbox, moved, timeout_s=HANG_S)
        assert ran.stdout == b"on\n"
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_paused_sandbox_is_captured_and_stays_paused(
    harness: ContainerHarness, sandbox: Handle
) -> None:
    driver = harness.driver
    await run(driver, sandbox, "echo kept > /kept")
    await driver.pause(sandbox)
    captured = await driver.capture(sandbox, new_uid())
    assert captured.frozen_s == 0.0
    assert (Path(captured.folders[0]) / "kept").read_text() == "kept\n"
    groups = driver._live[sandbox.uid].groups
    assert freezing.is_frozen(groups, kind=driver.pausing.kind)
    await driver.release(captured.id)
    await driver.resume(sandbox)
    assert (await run(driver, sandbox, "cat /kept")).stdout == b"kept\n"


async def test_a_storm_of_processes_is_captured_and_ended(harness: ContainerHarness) -> None:
    """(T11) A shell that copies itself up to its limit neither escapes the moment nor holds
    it up, and its end takes no longer than another's."""
    driver = harness.driver
    handle = await driver.start(harness.spec(uid=new_uid(), pids=64))
    storm = "f() { while :; do echo $$ > /storm; f & f & wait; done; }; f 2>/dev/null"
    task = asyncio.ensure_future(run(driver, handle, storm))
    groups = driver._live[handle.uid].groups
    await until(lambda: len(driver.shells._cgroups.workload(groups)) > 20)
    captured = await driver.capture(handle, new_uid())
    assert (Path(captured.folders[0]) / "storm").exists()
    await driver.release(captured.id)
    async with asyncio.timeout(HANG_S):
        await driver.stop(handle)
    await asyncio.wait({task})
    assert task.exception() is None or isinstance(task.exception(), SandboxDied)


async def test_branches_share_what_was_captured_and_write_apart(
    harness: ContainerHarness, sandbox: Handle, tmp_path: Path
) -> None:
    """(T09) And what they share is gone with the last of them."""
    driver, captures = harness.driver, harness.settings.captures_dir
    await run(driver, sandbox, "echo common > /common; rm /etc/group")
    captured = await driver.capture(sandbox, new_uid())
    specs = [harness.spec(uid=new_uid(), captures=captured.captures) for _ in range(3)]
    branches = await asyncio.gather(*(driver.start(spec) for spec in specs))
    await driver.release(captured.id)
    for number, branch in enumerate(branches):
        ran = await run(driver, branch, f"cat /common; ls /etc/group; echo {number} > /common")
        assert ran.stdout == b"common\n"
    assert (await run(driver, sandbox, "cat /common")).stdout == b"common\n"
    deeper = await driver.capture(branches[1], new_uid())
    assert deeper.captures == (captured.id, deeper.id)
    spec = harness.spec(uid=new_uid(), captures=deeper.captures)
    twig = await driver.start(spec)
    await driver.release(deeper.id)
    layer, _ = await captured_layer(driver, twig, tmp_path / "layer")
    for branch in branches:
        await driver.stop(branch)
    assert (await run(driver, twig, "cat /common; ls /etc/group")).stdout == b"1\n"
    await driver.stop(twig)
    assert list(captures.iterdir()) == []
    restored = await driver.start(harness.spec(uid=new_uid(), layers=[harness.layer, layer]))
    assert (await run(driver, restored, "cat /common; ls /etc/group")).stdout == b"1\n"
    await driver.stop(restored)
    with pytest.raises(NotFound):
        await driver.start(harness.spec(uid=new_uid(), captures=(captured.id,)))


async def test_captures_outlive_the_edge_while_a_branch_does(
    harness: ContainerHarness, sandbox: Handle
) -> None:
    driver, captures = harness.driver, harness.settings.captures_dir
    await run(driver, sandbox, "echo common > /common")
    captured = await driver.capture(sandbox, new_uid())
    spec = harness.spec(uid=new_uid(), captures=captured.captures)
    branch = await driver.start(spec)
    left = await driver.capture(sandbox, new_uid())  # nobody lets go of it
    assert {p.name for p in captures.iterdir()} == {captured.id, left.id}
    again = await harness.restart()
    await again.sweep(frozenset({sandbox.uid, branch.uid}))
    assert {p.name for p in captures.iterdir()} == {captured.id}
    recovered = await again.recover(branch, spec)
    assert recovered is not None
    assert (await run(again, recovered, "cat /common")).stdout == b"common\n"
    await again.stop(recovered)
    assert list(captures.iterdir()) == []
    await again.recover(sandbox, harness.spec(uid=sandbox.uid))
    for id in (captured.id, left.id):
        await driver.release(id)


async def test_a_full_disk_leaves_the_sandbox_running_and_nothing_else(
    harness: ContainerHarness, sandbox: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(T05)"""
    driver = harness.driver
    await run(driver, sandbox, "echo x > /x")

    def full(*_args: object, **_kw: object) -> None:
        raise OSError(28, "No space left on device")

    for still in (False, True):  # in the first pass, and while it stands still
        right = capturing.Mirror.bring_up

        def bring_up(self, *, hot=(), still=False, fails=still, right=right):  # type: ignore[no-untyped-def]
            return full() if still == fails else right(self, hot=hot, still=still)

        monkeypatch.setattr(capturing.Mirror, "bring_up", bring_up)
        with pytest.raises(CapacityExhausted):
            await driver.capture(sandbox, new_uid())
        monkeypatch.undo()
        assert list(harness.settings.captures_dir.iterdir()) == []
        assert (await run(driver, sandbox, "cat /x")).stdout == b"x\n"


async def test_a_capture_that_is_given_up_leaves_it_running(
    harness: ContainerHarness, sandbox: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = harness.driver
    begun, right = threading.Event(), capturing.Mirror.bring_up

    def slow(self, *, hot=(), still=False):  # type: ignore[no-untyped-def]
        if still:
            begun.set()
            while not self.cancelled():
                pass
        return right(self, hot=hot, still=still)

    monkeypatch.setattr(capturing.Mirror, "bring_up", slow)
    task = asyncio.ensure_future(driver.capture(sandbox, new_uid()))
    await until(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(harness.settings.captures_dir.iterdir()) == []
    assert (await run(driver, sandbox, "echo on")).stdout == b"on\n"


async def test_what_64_mib_cost(
    harness: ContainerHarness, sandbox: Handle, tmp_path: Path
) -> None:
    driver = harness.driver
    script = "for i in $(seq 64); do head -c 1048576 /dev/urandom > /f$i; done; cat /f* | md5sum"
    made = (await run(driver, sandbox, script)).stdout
    layer, packed = await captured_layer(driver, sandbox, tmp_path / "layer")
    assert packed.manifest.data_bytes >= 64 << 20
    restored = await driver.start(harness.spec(uid=new_uid(), layers=[harness.layer, layer]))
    assert (await run(driver, restored, "cat /f* | md5sum")).stdout == made
    await driver.stop(restored)
    assert hashlib.sha256(Path(layer.meta).read_bytes()).hexdigest() == layer.digest
