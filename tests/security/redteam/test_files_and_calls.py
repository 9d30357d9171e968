"""Paths that are protected and calls that are denied, against every known way around."""

from __future__ import annotations

import asyncio

import pytest

from services.edge.agent import wire
from services.edge.agent.wire import Tag
from services.edge.drivers.base import Feature
from services.edge.policy.plan import EGRESS, MOUNTS, RLIMITS, SECCOMP, SENSORS, SIGNALS
from shared.errors import InvalidRequest, PolicyDenied, Unsupported
from shared.policies.model import DENIABLE
from tests.conformance.harness import HANG_S, run, until
from tests.security.redteam.conftest import Field
from tests.security.redteam.test_findings import found

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.docker]

CALLS = {
    "ptrace": ("ptrace", "traceme", "peek"), "userns": ("userns", "userns-clone"),
    "mount": ("mount", "fsopen"), "bpf": ("bpf",), "io_uring": ("io_uring",),
    "userfaultfd": ("userfaultfd",), "keyring": ("keyring",),
    "raw_sockets": ("packet", "vsock", "alg", "icmp"), "fs_ioctl": ("swapext", "swapext-high"),
}  # fmt: skip
FILES = {
    "read_only": ["/bin", "/opt/tests"], "hidden": ["/opt/answers", "/proc/kpagecgroup?"],
    "protected": ["/opt/grader"],
}  # fmt: skip


async def test_every_denied_call_fails_and_is_told(field: Field) -> None:
    handle = await field.start({"processes": {"deny": list(DENIABLE)}})
    for attempts in CALLS.values():
        for what in attempts:
            assert await field.attempt(handle, what, "198.51.100.20") == "EPERM", what
    # the engine's own profile comes before ours: what it denies is denied, and not told
    ours = {f"processes.{r}" for r in ("ptrace", "io_uring", "raw_sockets", "fs_ioctl")}
    await until(lambda: ours <= {v.rule for v in field.of(handle, "seccomp")})
    await until(lambda: sum(v.rule == "processes.fs_ioctl" for v in field.of(handle)) >= 2)
    assert {v.rule for v in field.of(handle)} <= {f"processes.{rule}" for rule in CALLS}
    swaps = [v for v in field.of(handle, "seccomp") if v.rule == "processes.fs_ioctl"]
    assert [v.syscall for v in swaps] == ["ioctl XFS_IOC_SWAPEXT"] * 2
    assert {v.actor["comm"] for v in field.of(handle)} == {"attempt"}


async def test_what_is_not_denied_works_and_tells_nothing(field: Field) -> None:
    handle = await field.start({"preset": "locked", "processes": {"deny": ["ioctl:0x1234"]}})
    assert await field.attempt(handle, "ioctl-plain") == "ENOTTY"
    assert await field.attempt(handle, "fork") == "ok"
    out = await field.sh(
        handle,
        "cp /bin/busybox /tmp/ && /tmp/busybox echo copied; (sleep 0 & wait); echo x >/root/f; "
        "httpd -p 127.0.0.1:8000 -h /etc && wget -q -O- http://127.0.0.1:8000/group | head -1; "
        "awk 'BEGIN { print 2 + 2 }'; tar -C /etc -cf - group | tar -tf -; kill -0 $$ && echo own",
    )
    assert out.splitlines() == ["copied", "root:x:0:", "4", "group", "own"]
    assert field.of(handle) == []


async def test_a_node_names_what_enforces_each_part(field: Field) -> None:
    """(S12) What the compiler looks for is what the node's probe says."""
    found = (await field.driver.probe()).features
    for name in (EGRESS, MOUNTS, SECCOMP, RLIMITS, SIGNALS, SENSORS, "exec", "pids_limit"):
        assert found[name].supported and found[name].reason, name


async def test_signals_stay_in_the_sandbox(field: Field) -> None:
    """(S12) Every number there is, and all at once, as root."""
    other = await field.start()
    denied = {"processes": {"deny": ["signals"]}, "require": ["processes.signals"]}
    handle = await field.start(denied)
    assert handle.enforcement["processes.signals"].startswith("PID namespace")
    await field.sh(other, "sleep 1000 >/dev/null 2>&1 & echo $! >/tmp/pid")
    shot = "i=2; while [ $i -lt 5000 ]; do [ $i = $$ ] || kill -9 $i 2>/dev/null; i=$((i+1)); done"
    await field.sh(handle, f"{shot}; kill -9 1; kill -9 -1")
    assert await field.sh(handle, "echo lives") == "lives"
    assert await field.sh(other, "kill -0 $(cat /tmp/pid) && echo lives") == "lives"


async def test_each_denied_call_is_counted_once_in_a_flood(field: Field) -> None:
    handle = await field.start({"processes": {"deny": ["ptrace"]}})
    assert await field.attempt(handle, "calls", "", "500") == "ok"
    told = await field.when_told(handle, "seccomp", 500)
    assert sum(v.count for v in told) == 500


async def test_read_only_trees_hold_against_every_way_around(field: Field) -> None:
    handle = await field.start({"files": FILES})
    ways = (
        "echo x >/bin/sh", "rm /bin/sh", "mv /bin /bin2", "cp /etc/group /bin/new",
        "truncate -s 0 /bin/busybox", "ln -sf /tmp/x /bin/sh", "mount -o remount,rw /bin",
        "umount /bin", "mv /opt /opt2", "mv /opt/tests /opt/t2", "rm -rf /opt/tests",
        "echo x >/proc/self/root/bin/sh", "cd /opt && mv tests gone",
        "ln -s /opt/tests/test_it.py /tmp/l && echo x >/tmp/l",
    )  # fmt: skip
    for way in ways:
        assert await field.sh(handle, f"({way}) 2>/dev/null || echo refused") == "refused", way
    kept = await field.sh(handle, "cat /opt/tests/test_it.py; /bin/sh -c 'echo works'")
    assert kept.splitlines() == ["the test", "works"]


async def test_a_root_that_is_read_only_leaves_no_tree_below_it_writable(field: Field) -> None:
    handle = await field.start({"files": {"read_only": ["/opt/tests", "/"]}})
    for way in ("echo x >/opt/new", "rm -r /opt/answers", "echo x >/opt/tests/new", "echo x >/new"):
        assert await field.sh(handle, f"({way}) 2>/dev/null || echo refused") == "refused", way


async def test_a_protected_file_stays_and_can_be_run(field: Field) -> None:
    handle = await field.start({"files": FILES})
    ways = (
        "echo x >/opt/grader", "rm /opt/grader", "mv /opt/grader /opt/g", "chmod 0 /opt/grader",
        "cp /etc/group /opt/x && mv /opt/x /opt/grader", "mv /opt /opt2",
    )
    for way in ways:
        assert await field.sh(handle, f"({way}) 2>/dev/null || echo refused") == "refused", way
    assert await field.sh(handle, "/opt/grader; echo new >/opt/beside; cat /opt/beside") == (
        "graded\nnew"
    )


async def test_what_is_hidden_is_found_by_no_name(field: Field) -> None:
    handle = await field.start({"files": FILES})
    out = await field.sh(
        handle,
        "ls -A /opt/answers; cat /opt/answers/answer.txt; umount /opt/answers; "
        "cat /proc/self/root/opt/answers/answer.txt; grep -r 42 /opt/answers; "
        "find / -xdev -name answer.txt; wc -c </proc/kpagecgroup; touch /opt/answers/x",
    )
    assert "42" not in out.split() and "/opt/answers/answer.txt" not in out.splitlines()
    assert "0" in out.splitlines()


async def test_a_link_at_the_top_cannot_be_swapped(field: Field) -> None:
    """Merged systems have /bin as a link: who replaces it has replaced every program."""
    tree = field.harness.settings.state_dir / "linked"
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "lnk").symlink_to("usr/bin")
    from tests.integration.container.images import pack

    layers = [*field.harness.spec(uid="x").layers, pack(tree, "linked")]
    spec = field.spec({"files": {"read_only": ["/lnk"]}}, layers=layers)
    handle = await field.begin(spec)
    ways = (
        "rm /lnk", "mv /lnk /l2", "touch /lnk/x", "mv /usr /u2", "ln -s /tmp /l && mv -T /l /lnk",
        "umount /lnk", "ln /lnk /l3 && rm /lnk",
    )  # fmt: skip
    for way in ways:
        assert await field.sh(handle, f"({way}) 2>/dev/null || echo refused") == "refused", way
    assert await field.sh(handle, "readlink /lnk; ls -d /lnk/.") == "usr/bin\n/lnk/."
    assert await field.sh(handle, "touch /new /tmp/x /root/y /opt/z && echo fine") == "fine"


async def test_every_link_on_the_way_is_held_and_the_folders_it_leads_through(field: Field) -> None:
    """A path is what its name leads to: by no link, and by no folder above what a link leads
    to, is another file put there."""
    tree = field.harness.settings.state_dir / "far"
    (tree / "data/tools/v1").mkdir(parents=True)
    (tree / "data/tools/v1/run").write_text("graded")
    (tree / "data/now").symlink_to("tools/../tools/v1")
    (tree / "grader").symlink_to("/data/now/run")
    (tree / "srv").mkdir()
    (tree / "srv/grader").symlink_to("../grader")
    from tests.integration.container.images import pack

    layers = [*field.harness.spec(uid="x").layers, pack(tree, "far")]
    handle = await field.begin(field.spec({"files": {"protected": ["/srv/grader"]}}, layers=layers))
    ways = (
        "echo x >/srv/grader", "rm /srv/grader", "mv /srv /s2", "mv /grader /g2", "rm /grader",
        "mv /data /d2", "mv /data/now /data/n2", "ln -sfn /tmp /data/now", "mv /data/tools /t2",
        "mv /data/tools/v1 /data/tools/v2", "rm /data/tools/v1/run", "echo x >/data/now/run",
    )  # fmt: skip
    for way in ways:
        assert await field.sh(handle, f"({way}) 2>/dev/null || echo refused") == "refused", way
    assert await field.sh(handle, "cat /srv/grader; touch /data/tools/beside") == "graded"


async def test_links_of_a_merged_system_are_held_together(field: Field) -> None:
    """Who names /bin names what programs are found and loaded by."""
    tree = field.harness.settings.state_dir / "merged"
    for name in ("sbin", "lib64"):
        (tree / "usr" / name).mkdir(parents=True)
        (tree / name).symlink_to(f"usr/{name}")
    (tree / "usr/tools").mkdir()
    (tree / "tools").symlink_to("usr/tools")
    from tests.integration.container.images import pack

    layers = [*field.harness.spec(uid="x").layers, pack(tree, "merged")]
    handle = await field.begin(field.spec({"files": {"read_only": ["/tools"]}}, layers=layers))
    links = await field.sh(handle, "for l in /sbin /lib64; do [ -h $l ] && echo $l; done")
    assert "/lib64" in links.split()
    for link in links.split():
        for way in (f"rm {link}", f"mv {link} /l2", f"ln -sfn /tmp {link}"):
            assert await field.sh(handle, f"({way}) 2>/dev/null || echo refused") == "refused", way


async def test_a_program_that_may_not_run_does_not(field: Field) -> None:
    handle = await field.start({"processes": {"deny": ["exec:/opt/grader"]}})
    assert "graded" not in await field.sh(handle, "/opt/grader")
    assert "echo graded" in await field.sh(handle, "cat /opt/grader; /bin/true")
    assert "processes.exec" in handle.enforcement


async def test_limits_of_processes_hold(field: Field) -> None:
    limits = {"open_files": 32, "file_mb": 1, "output_bytes": 1024, "pids": 32}
    handle = await field.start({"resources": limits})
    assert await field.sh(handle, "ulimit -n; ulimit -Hn") == "32\n32"
    out = await field.sh(handle, "dd if=/dev/zero of=/tmp/f bs=1k count=2000; stat -c %s /tmp/f")
    assert out.splitlines()[0] == str(1 << 20)
    assert len(await field.sh(handle, "yes | head -c 100000")) <= 1024


async def test_a_path_that_is_not_there_is_refused_by_name(field: Field) -> None:
    before = field.harness.leftovers()
    for files in ({"protected": ["/opt/none"]}, {"read_only": ["/opt/none/x"]}):
        with pytest.raises(InvalidRequest) as caught:
            await field.start({"files": files})
        assert caught.value.field == "policy.files"
    assert field.harness.leftovers() <= before


async def test_what_no_mechanism_enforces_is_refused_before_a_start(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    await field.driver.probe()
    without = {**field.driver._features, "disk_limit": Feature(False, "no quota")}
    monkeypatch.setattr(field.driver, "_features", without)
    before = field.harness.leftovers()
    with pytest.raises(PolicyDenied) as caught:
        await field.start({"resources": {"disk_mb": 10}})
    assert caught.value.field == "policy.resources.disk_mb"
    assert field.harness.leftovers() <= before


async def test_files_of_a_running_sandbox_stay_as_they_were(field: Field) -> None:
    spec = field.spec({"files": FILES})
    handle = await field.begin(spec)
    with pytest.raises(Unsupported) as caught:
        await field.driver.set_policy(handle, field.spec({}, uid=spec.uid))
    assert caught.value.field == "policy.files"


async def test_calls_are_denied_to_commands_after_a_change(field: Field) -> None:
    spec = field.spec({})
    handle = await field.begin(spec)
    assert await field.attempt(handle, "traceme") == "ok"
    stricter = field.spec({"processes": {"deny": ["ptrace"]}}, uid=spec.uid)
    handle = await field.driver.set_policy(handle, stricter)
    assert await field.attempt(handle, "traceme") == "EPERM"
    assert handle.enforcement["processes.ptrace"].startswith("seccomp")
    await field.driver.set_policy(handle, spec)
    assert await field.attempt(handle, "traceme") == "ok"


async def test_a_session_takes_another_policy(field: Field) -> None:
    """Its shell kept the filter that it began with; the next command gets another shell, and
    only where denied calls changed."""
    spec = field.spec({})
    handle = await field.begin(spec)

    async def attempt(text: str = "/attempt traceme; sleep 0.2") -> tuple[str, bool]:
        ran = await run(field.driver, handle, text, session="s", timeout_s=HANG_S)
        return ran.stdout.decode().strip(), ran.outcome.session_fresh

    stricter = field.spec({"processes": {"deny": ["ptrace"]}}, uid=spec.uid)
    assert await attempt() == ("ok", True)
    assert await attempt() == ("ok", False)
    running = asyncio.ensure_future(attempt(": >/tmp/begun; sleep 1; /attempt traceme"))
    await field.sh(handle, "until [ -e /tmp/begun ]; do sleep 0.02; done")
    handle = await field.driver.set_policy(handle, stricter)
    waiting = asyncio.gather(attempt(), attempt())
    assert await running == ("ok", False)  # what runs keeps what it has
    assert await waiting == [("EPERM", True), ("EPERM", False)]
    handle = await field.driver.set_policy(handle, stricter)
    assert await attempt() == ("EPERM", False)
    handle = await field.driver.set_policy(handle, spec)
    assert await attempt() == ("ok", True)


async def test_exploits_meant_for_another_machine_meet_a_wall_and_are_found(field: Field) -> None:
    """Commands of an exploit that ran in the agent's own container instead of its target."""
    handle = await field.start({"preset": "locked"})
    for attempts in CALLS.values():
        for what in attempts:
            assert await field.attempt(handle, what, "198.51.100.20") == "EPERM", what
    ways = (
        "echo c >/proc/sysrq-trigger",
        "mknod /tmp/mem c 1 1 && cat /tmp/mem", "mknod /tmp/d b 8 0 && cat /tmp/d",
        "insmod /tmp/exploit.ko", "echo '|/tmp/x' >/proc/sys/kernel/core_pattern",
        "echo 1 >/proc/sys/kernel/panic", "reboot -f", "echo x >/sys/kernel/uevent_helper",
        "nsenter -t 1 -m true", "chroot /proc/1/root true", "kill -9 1; kill -0 1 && false",
    )  # fmt: skip
    for way in ways:
        said = await field.sh(handle, f"({way}) >/dev/null 2>&1 || echo refused")
        assert said == "refused", way
    assert await field.sh(handle, "echo lives") == "lives"
    wanted = {"processes.io_uring", "processes.fs_ioctl"}
    await until(lambda: wanted <= {v.rule for v in field.of(handle, "seccomp")})
    await until(lambda: len(found(field, handle)) >= 2)
    findings = found(field, handle)
    assert findings.keys() == {"privilege_attempt", "extent_swap_ioctl"}


async def test_a_profile_that_the_kernel_does_not_apply_runs_nothing(field: Field) -> None:
    """An engine that is told a profile on a kernel without it says yes; a command is run by
    the agent, and the agent asks the kernel."""
    handle = await field.start()
    agent = field.driver._live[handle.uid].agent
    await agent.policy(wire.field(Tag.PROFILE, "dsec-missing"), None)
    with pytest.raises(PolicyDenied, match="AppArmor"):
        await run(field.driver, handle, "echo ran", timeout_s=30)
    await agent.policy(b"", None)
    assert await field.sh(handle, "echo ran") == "ran"
