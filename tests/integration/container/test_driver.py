"""The driver on real Docker: nothing visible from inside, nothing left outside."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from services.edge.agent.client import AgentClient
from services.edge.agent.commands import resume_command
from services.edge.drivers.base import Layer
from services.edge.drivers.container import ContainerDriver, ContainerSettings
from shared.errors import Conflict, InvalidRequest, Unavailable, Unsupported
from tests.conformance.harness import HANG_S, Recorder, new_uid, run, until
from tests.integration.container.harness import ContainerHarness
from tests.integration.container.images import small_layer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]


async def test_nothing_of_the_agent_can_be_read_from_inside(
    harness: ContainerHarness,
) -> None:
    """(S06) As root, of every process of the agent: memory, environment, descriptors,
    root; and its socket folder does not exist."""
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    try:
        script = (
            "n=0; for d in /proc/[0-9]*; do [ $(cat $d/comm) = aether ] || continue; n=$((n+1)); "
            "for f in environ mem maps auxv; do head -c1 $d/$f 2>/dev/null && echo $d/$f; done; "
            "readlink $d/cwd $d/root $d/exe; ls -l $d/fd 2>/dev/null | grep -- '->'; done; "
            "ls -d /run/dsec /newroot /aether 2>/dev/null; find / -xdev -name agent.sock; "
            "[ $n -ge 2 ] && echo end"
        )
        ran = await run(harness.driver, handle, script, env={"SECRET": "canary"})
        assert ran.stdout == b"end\n", ran.stdout
        seen = await run(harness.driver, handle, "cat /proc/1/cmdline | tr '\\0' ' '")
        assert seen.stdout.split() == [b"/aether"]
        ran = await run(harness.driver, handle, "cat /proc/mounts /proc/self/mountinfo")
        assert b"/run/dsec" not in ran.stdout and b"newroot" not in ran.stdout
    finally:
        await harness.driver.stop(handle)


async def test_secrets_are_in_no_command_line_of_the_host(
    harness: ContainerHarness,
) -> None:
    """(S07)"""
    handle = await harness.driver.start(harness.spec(uid=new_uid(), env={"TOKEN": "canary-4711"}))
    try:
        task = asyncio.ensure_future(
            run(harness.driver, handle, "echo $TOKEN; sleep 1", env={"OTHER": "canary-4712"})
        )
        await asyncio.sleep(0.3)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                line = Path("/proc", pid, "cmdline").read_bytes()
            except OSError:
                continue
            assert b"canary-471" not in line
        assert (await task).stdout == b"canary-4711\n"
        inspected = docker.from_env().api.inspect_container(handle.data["container"])
        assert "canary" not in str(inspected)
    finally:
        await harness.driver.stop(handle)


async def test_the_engines_protection_stays_in_force(harness: ContainerHarness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    try:
        ran = await run(harness.driver, handle, "cat /proc/self/status")
        lines = ran.stdout.decode().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert (status["NoNewPrivs"], status["Seccomp"].strip()) == ("1", "2")
        caps = int(status["CapEff"], 16)
        for forbidden in (13, 19, 21, 27):  # NET_RAW, SYS_PTRACE, SYS_ADMIN, MKNOD
            assert not caps >> forbidden & 1
        ran = await run(
            harness.driver, handle,
            "echo 1 >/proc/sys/kernel/sysrq; echo x >/sys/kernel/uevent_helper; "
            "mkdir /sys/fs/cgroup/memory/x; mount -t tmpfs x /tmp; cat /proc/kcore; "
            "cat /proc/keys /proc/timer_list; ls /proc/acpi /sys/firmware",
        )  # fmt: skip
        assert ran.stdout == b"/proc/acpi:\n\n/sys/firmware:\n" and ran.stderr.count(b"\n") >= 5
    finally:
        await harness.driver.stop(handle)


@pytest.mark.parametrize(("wanted", "name"), [("box-1", b"box-1"), ("", b"sandbox")])
async def test_loopback_works_and_is_all_there_is(
    harness: ContainerHarness, wanted: str, name: bytes
) -> None:
    spec = harness.spec(uid=new_uid(), hostname=wanted)
    handle = await harness.driver.start(spec)
    try:
        assert handle.enforcement["network"] == "none (no interface)"
        script = (
            "ls /sys/class/net; hostname; httpd -p 127.0.0.1:8000 -h /etc; "
            "wget -q -O- http://127.0.0.1:8000/group | head -1; grep -c localhost /etc/hosts; "
            "grep -cw \"$(hostname)\" /etc/hosts; "
            "wget -T2 -q -O- http://192.0.2.1/ || echo unreachable"
        )
        ran = await run(harness.driver, handle, script, timeout_s=HANG_S)
        assert ran.stdout.split() == [b"lo", name, b"root:x:0:", b"2", b"1", b"unreachable"]
    finally:
        await harness.driver.stop(handle)


async def test_two_sandboxes_share_a_layer_and_nothing_written(
    harness: ContainerHarness,
) -> None:
    one = await harness.driver.start(harness.spec(uid=new_uid()))
    two = await harness.driver.start(harness.spec(uid=new_uid()))
    try:
        await run(harness.driver, one, "echo changed >/etc/passwd; echo x >/new; rm -rf /home")
        ran = await run(harness.driver, two, "head -c4 /etc/passwd; ls -d /home; ls /new")
        assert ran.stdout == b"root/home\n"
    finally:
        await harness.driver.stop(one)
        await harness.driver.stop(two)


async def test_all_of_many_layers_are_visible(harness: ContainerHarness, tmp_path: Path) -> None:
    """(I07)"""
    layers = [harness.layer, *(small_layer(tmp_path, n) for n in range(120))]
    handle = await harness.driver.start(harness.spec(uid=new_uid(), layers=layers))
    try:
        ran = await run(
            harness.driver, handle, "ls /layers | wc -l; echo w >/w; cat /w /layers/119"
        )
        assert ran.stdout.split() == [b"120", b"w", b"119"]
    finally:
        await harness.driver.stop(handle)


async def test_a_shell_taken_while_it_makes_its_helpers_has_its_root_everywhere(
    harness: ContainerHarness,
) -> None:
    """The agent clones processes in the very moment its root changes."""
    fresh = await harness.restart()  # no shell is ready: each start takes a new one
    for _ in range(12):
        handle = await fresh.start(harness.spec(uid=new_uid()))
        for script in ("ls -d /newroot /run/dsec /aether; ls /bin/busybox", "pwd", "echo x >/x"):
            ran = await asyncio.gather(*(run(fresh, handle, script) for _ in range(3)))
            assert all(r.code == 0 and b"aether" not in r.stdout for r in ran), ran
        await fresh.stop(handle)


async def test_a_failed_start_leaves_nothing_and_blocks_no_name(
    harness: ContainerHarness, tmp_path: Path
) -> None:
    """(L05)"""
    (tmp_path / "broken").write_bytes(b"no file system" * 1000)
    broken = Layer("sha256:broken", str(tmp_path / "broken"))
    before = harness.leftovers()
    uid = new_uid()
    for layers in ([broken], [harness.layer, broken], []):
        with pytest.raises((Unavailable, InvalidRequest)):
            await harness.driver.start(harness.spec(uid=uid, layers=layers))
    assert harness.leftovers() <= before
    for _ in range(10):
        handle = await harness.driver.start(harness.spec(uid=uid))
        assert (await run(harness.driver, handle, "echo ok")).stdout == b"ok\n"
        await harness.driver.stop(handle)


@pytest.mark.parametrize("changes", [{"memory_mb": 0}, {"pids": -1}, {"cpu_cores": 0},
                                     {"hostname": "a b"}])  # fmt: skip
async def test_a_bad_spec_is_refused_by_field(
    harness: ContainerHarness, changes: dict[str, object]
) -> None:
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        await harness.driver.start(harness.spec(uid=new_uid(), **changes))
    assert caught.value.field in changes


async def test_an_image_cannot_lead_the_attach_astray(
    harness: ContainerHarness, tmp_path: Path
) -> None:
    """An image whose /etc is a link to the shell's socket folder gets no sandbox."""
    from tests.integration.container.images import pack

    tree = tmp_path / "evil"
    tree.mkdir()
    (tree / "etc").symlink_to("/run/dsec")
    before = harness.leftovers()
    with pytest.raises(InvalidRequest, match="etc") as caught:
        await harness.driver.start(harness.spec(uid=new_uid(), layers=[pack(tree, "evil")]))
    assert caught.value.cause == "image"
    assert harness.leftovers() <= before
    for folder in harness.settings.shells_dir.iterdir():
        # the second: of a spare that is being made
        assert {p.name for p in folder.iterdir()} <= {"agent.sock", "agent.sock.new", "decoy"}


async def test_a_restarted_edge_finds_a_running_command_and_its_output(
    harness: ContainerHarness,
) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    spec_uid = harness.spec(uid=handle.uid)
    io = Recorder()
    script = "echo early; until [ -e /tmp/go ]; do sleep 0.05; done; echo late; exit 3"
    lost = asyncio.ensure_future(run(harness.driver, handle, script, io=io))
    await io.started.wait()
    key = (await harness.driver._live[handle.uid].agent.list())[0].key
    fresh = await harness.restart()
    assert await fresh.recover(handle, spec_uid)
    again = Recorder()
    following = asyncio.create_task(fresh.resume_exec(handle, key, again))
    await run(fresh, handle, ": >/tmp/go")
    outcome = await following
    assert outcome is not None
    assert (outcome.exit_code, again.stdout) == (3, b"early\nlate\n")
    agent = fresh._live[handle.uid].agent
    async with asyncio.timeout(HANG_S):  # taken, so forgotten, a moment later
        while await agent.list():
            await asyncio.sleep(0.01)
    assert await fresh.resume_exec(handle, key, again) is None
    await asyncio.gather(lost, return_exceptions=True)
    await fresh.stop(handle)
    harness.driver._live.pop(handle.uid, None)


async def test_a_result_nobody_took_is_kept(harness: ContainerHarness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    agent = harness.driver._live[handle.uid].agent
    io = Recorder()
    script = "echo x; until [ -e /tmp/go ]; do sleep 0.05; done; echo over >/tmp/over; exit 9"
    lost = asyncio.ensure_future(run(harness.driver, handle, script, io=io))
    await io.started.wait()
    key = (await agent.list())[0].key
    harness.driver._live[handle.uid].stopping = True
    agent.close()
    await asyncio.gather(lost, return_exceptions=True)
    inside = Path(f"/proc/{handle.data['pid']}/root/tmp")
    (inside / "go").touch()  # it ends while nobody is there
    await until((inside / "over").exists)
    await asyncio.sleep(0.5)
    fresh: AgentClient = await harness.driver.shells.reconnect(handle.data["name"])
    again = Recorder()
    outcome = await resume_command(fresh, key, again)
    assert outcome is not None and (outcome.exit_code, again.stdout) == (9, b"x\n")
    fresh.close()
    await harness.driver.stop(handle)


async def test_an_agent_of_another_generation_is_refused(harness: ContainerHarness) -> None:
    """(B17)"""
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    try:
        path = harness.driver.shells.socket(handle.data["name"])
        with pytest.raises(Unsupported) as caught:
            await AgentClient.connect(path, generation="another")
        assert caught.value.field == "generation"
    finally:
        await harness.driver.stop(handle)


async def test_fifty_sandboxes_leave_nothing(harness: ContainerHarness) -> None:
    """(T01)"""

    async def cycle() -> None:
        handle = await harness.driver.start(harness.spec(uid=new_uid(), cpu_cores=1))
        assert (await run(harness.driver, handle, "sleep 100 & echo x >/x")).code == 0
        await harness.driver.stop(handle)

    async def measure() -> dict[str, int]:
        await until(lambda: harness.driver._pool.ready == 2 and harness.driver._pool.making == 0)
        await harness.driver._reaper.idle()
        gc.collect()
        name = harness.settings.cgroup_parent
        parents = Path("/sys/fs/cgroup").glob(f"*/{name}")
        groups = sum(len(dirs) for p in parents for _, dirs, _ in os.walk(p))
        found = len(await harness.driver._engine.shells())
        state = str(harness.settings.state_dir)
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mounts": Path("/proc/self/mountinfo").read_text().count(state),
            "groups": groups, "containers": found,
            "folders": len(list(harness.settings.state_dir.glob("*/*"))),
        }  # fmt: skip

    async def cycles(rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.gather(*(cycle() for _ in range(6)))

    await cycles(4)  # threads and connections to the engine come with the first load
    seen = [await measure()]
    for _ in range(3):  # what is left behind grows with each; what a busier moment needs, once
        await cycles(9)
        seen.append(await measure())
        before, after = seen[-2:]
        if all(after[kind] - before[kind] <= 2 for kind in before):
            return
    pytest.fail(f"it grows: {seen}")


async def test_grace_lets_a_command_clean_up(harness: ContainerHarness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    io = Recorder()
    script = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    task = asyncio.ensure_future(run(harness.driver, handle, script, io=io))
    await io.started.wait()
    await harness.driver.stop(handle, grace_s=HANG_S)
    assert (await asyncio.gather(task, return_exceptions=True))[0]
    assert io.stdout == b"up\nbye\n"


async def test_an_engine_that_is_not_there_is_a_reason(
    harness: ContainerHarness, tmp_path: Path
) -> None:
    url = f"unix://{tmp_path}/none.sock"
    settings = ContainerSettings(node="none", state_dir=tmp_path, docker_url=url)
    driver = ContainerDriver(settings)
    report = await driver.probe()
    assert not report.supported and "engine" in report.reason

    async def nobody(_exited: object) -> None:
        return None

    await driver.open(nobody)
    try:
        with pytest.raises(Unavailable, match="engine"):
            await driver.start(harness.spec(uid=new_uid()))
        assert not list(settings.sandboxes_dir.iterdir())
        assert not list(settings.shells_dir.iterdir())
    finally:
        await driver.close()


async def test_a_removed_shell_image_is_made_again(harness: ContainerHarness) -> None:
    tag = harness.driver._engine._image
    fresh = await harness.restart()
    docker.from_env().images.remove(tag, force=True)
    with contextlib.suppress(Unavailable):
        await fresh.stop(await fresh.start(harness.spec(uid=new_uid())))
    handle = await fresh.start(harness.spec(uid=new_uid()))
    await fresh.stop(handle)


async def test_the_words_of_a_dying_agent_are_in_the_reason(
    harness: ContainerHarness, tmp_path: Path
) -> None:
    """(O06) A shell whose agent ends at once says why."""
    script = tmp_path / "aether"
    script.write_bytes(harness.settings.aether.read_bytes())
    settings = replace(
        harness.settings, node="dying", aether=script, state_dir=tmp_path / "s", pool_size=0,
        agent_s=2.0,
    )  # fmt: skip
    driver = ContainerDriver(settings)

    async def nobody(_exited: object) -> None:
        return None

    await driver.open(nobody)
    try:
        folder = settings.shells_dir / "x"
        (folder / "agent.sock").mkdir(parents=True)  # it cannot listen there
        with pytest.raises(Unavailable, match="cannot listen"):
            shell = await driver._engine.create_shell("dsec-dying-x", folder)
            async with asyncio.timeout(HANG_S):
                while (ending := await driver._engine.ending(shell.id)).running:
                    await asyncio.sleep(0.1)
            await driver._engine.remove(shell.id)
            raise Unavailable(ending.last_words)
    finally:
        await driver.close()


async def test_a_uid_in_use_is_a_conflict(harness: ContainerHarness) -> None:
    uid = new_uid()
    handle = await harness.driver.start(harness.spec(uid=uid))
    with pytest.raises(Conflict):
        await harness.driver.start(harness.spec(uid=uid))
    await harness.driver.stop(handle)


async def test_a_shell_that_the_engine_made_after_its_edge_died_is_removed(
    harness: ContainerHarness,
) -> None:
    """Its creation was on its way when the edge was killed: no sweep had seen it."""
    earlier = ContainerDriver(harness.settings)
    folder = harness.settings.shells_dir / "late"
    folder.mkdir(parents=True, exist_ok=True)
    shell = await earlier._engine.create_shell(f"dsec-{harness.settings.node}-late", folder)
    await harness.driver._sweep_shells()
    assert shell.id not in {s.id for s in await harness.driver._engine.shells()}
