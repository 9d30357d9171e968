"""Control groups of sandboxes: pure v2, or v1 with an empty v2 tree beside it.

Owns: finding a container's groups, the ``work`` group below them in which the workload
lives (its agent stays outside, so that limits never starve it), limits, usage, killing,
removal. Does not own: which limits, and containers. Paths are plain data: they are
journalled with a sandbox and outlive the edge. Blocking; called in threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.edge.agent.handshake import CgroupFds
from services.edge.drivers.base import Usage
from shared.errors import Unavailable, Unsupported

Kind = Literal["v2", "v1"]
V1_WANTED = ("memory", "pids", "cpu", "cpuacct", "freezer")
WORK = "work"
AGENT = "agent"
CPU_PERIOD_US = 100_000
PIDS_OF_AGENT = 13  # the launcher, six nests and their spares live in the workload's groups
KILL_WAIT_S = 5.0
REMOVE_WAIT_S = 2.0
POLL_S = 0.0005
GRACE_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one container: ``v1`` directory per controller, ``v2`` directory."""

    v1: Mapping[str, str] = field(default_factory=dict)
    v2: str | None = None

    def data(self) -> dict[str, Any]:
        return {"v1": dict(self.v1), "v2": self.v2}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Groups:
        return cls(dict(data["v1"]), data["v2"])


@dataclass(frozen=True, slots=True)
class Limits:
    """``None`` = not limited. ``swap_mb`` comes on top of ``memory_mb``."""

    cpu_cores: float | None = None
    memory_mb: int | None = None
    pids: int | None = None
    swap_mb: int = 0


class CgroupDriver:
    """The hierarchies of this host."""

    def __init__(self, v1: Mapping[str, str], v2: str, v2_controllers: frozenset[str]) -> None:
        self._v1 = v1
        self._v2 = v2
        self._v2_controllers = v2_controllers

    @classmethod
    def probe(cls) -> CgroupDriver:
        """Raises ``Unsupported`` with the reason when commands could not be limited or
        killed as whole trees here."""
        v1, v2 = _hierarchies()
        if v2 is None:
            raise Unsupported("no cgroup2 hierarchy is mounted", field="cgroups")
        if not any((p / "cgroup.kill").exists() for p in Path(v2).iterdir() if p.is_dir()):
            _require_kill(v2)
        controllers = frozenset(Path(v2, "cgroup.controllers").read_text().split())
        missing = [c for c in ("memory", "pids", "cpu") if c not in v1 and c not in controllers]
        if missing:
            raise Unsupported(f"no cgroup controller {', '.join(missing)}", field="cgroups")
        return cls(v1, v2, controllers)

    @property
    def mode(self) -> str:
        return "v2" if "memory" in self._v2_controllers else "v1"

    @property
    def freezer(self) -> Kind | None:
        """Which freezer stops a workload. v2's is preferred, also beside v1 controllers."""
        if self._has("cgroup.freeze"):
            return "v2"
        return "v1" if "freezer" in self._v1 else None

    @property
    def reclaims(self) -> bool:
        """Whether memory can be had back from a group whose processes stand still."""
        return self.mode == "v1" or self._has("memory.reclaim")

    def _has(self, file: str) -> bool:
        return any((p / file).exists() for p in Path(self._v2).iterdir() if p.is_dir())

    @staticmethod
    def workload(groups: Groups) -> list[int]:
        """The processes of the workload."""
        return list(_pids_below(Path(groups.v2 or "/nonexistent", WORK)))

    def of_process(self, pid: int, name: str) -> Groups:
        """The groups of a container by its first process. ``name`` is used for a v2
        group where the engine made none."""
        v1: dict[str, str] = {}
        v2 = self._v2 + f"/dsec/{name}"
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                if controller in self._v1 and path != "/":
                    v1[controller] = self._v1[controller] + path
            if not controllers and path != "/":
                v2 = self._v2 + path
        if not Path(v2).exists():
            Path(v2).mkdir(parents=True)
            Path(v2, "cgroup.procs").write_text(str(pid))
        return Groups(v1, v2)

    def make_work(self, groups: Groups) -> CgroupFds:
        """Makes the ``work`` groups; returns descriptors for the agent, to be closed by
        :func:`close_fds`."""
        assert groups.v2 is not None
        if self.mode == "v2":
            self._delegate(Path(groups.v2))
        procs: list[int] = []
        oom: int | None = None
        for directory in _unique(groups.v1.values()):
            work = Path(directory, WORK)
            work.mkdir(exist_ok=True)
            procs.append(os.open(work / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        work = Path(groups.v2, WORK)
        work.mkdir(exist_ok=True)
        counter = oom_file(groups)
        if counter.exists():
            oom = os.open(counter, os.O_RDONLY | os.O_CLOEXEC)
        return CgroupFds(procs, os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), oom)

    def _delegate(self, group: Path) -> None:
        """v2 has no processes beside limited children: the agent gets a group of its own."""
        agent = group / AGENT
        agent.mkdir(exist_ok=True)
        for pid in (group / "cgroup.procs").read_text().split():
            (agent / "cgroup.procs").write_text(pid)
        wanted = [c for c in ("memory", "pids", "cpu") if c in self._v2_controllers]
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in wanted))

    def limit(self, groups: Groups, limits: Limits) -> dict[str, str]:
        """Writes the limits; returns which mechanism enforces which. Raises
        ``Unavailable`` when one cannot be written."""
        done: dict[str, str] = {}
        try:
            for name, directory, file, value, how in self._writes(groups, limits):
                path = Path(directory, WORK, file)
                if file.endswith("memsw.limit_in_bytes") and not path.exists():
                    continue  # the kernel does not account swap
                path.write_text(value)
                done[name] = how
        except OSError as err:
            raise Unavailable(
                f"the {name} limit cannot be set: {err.strerror}", field=name, cause="runtime"
            ) from err
        return done

    def _writes(self, groups: Groups, limits: Limits) -> Iterator[tuple[str, str, str, str, str]]:
        v1, v2 = groups.v1, groups.v2 or ""
        if limits.memory_mb is not None:
            size, swap = limits.memory_mb << 20, limits.swap_mb << 20
            if "memory" in v1:
                how = "cgroup v1 memory"
                yield "memory_mb", v1["memory"], "memory.limit_in_bytes", str(size), how
                total = str(size + swap)
                yield "memory_mb", v1["memory"], "memory.memsw.limit_in_bytes", total, how
            else:
                yield "memory_mb", v2, "memory.swap.max", str(swap), "cgroup v2 memory"
                yield "memory_mb", v2, "memory.max", str(size), "cgroup v2 memory"
        if limits.pids is not None:
            directory, how = (v1["pids"], "v1") if "pids" in v1 else (v2, "v2")
            count = str(limits.pids + PIDS_OF_AGENT)
            yield "pids", directory, "pids.max", count, f"cgroup {how} pids"
        if limits.cpu_cores is not None:
            quota = max(1000, int(limits.cpu_cores * CPU_PERIOD_US))
            if "cpu" in v1:
                shares = max(2, int(1024 * limits.cpu_cores))
                yield "cpu_cores", v1["cpu"], "cpu.shares", str(shares), "cgroup v1 cpu"
                yield "cpu_cores", v1["cpu"], "cpu.cfs_quota_us", str(quota), "cgroup v1 cpu"
            else:
                weight = min(10000, max(1, int(100 * limits.cpu_cores)))
                yield "cpu_cores", v2, "cpu.weight", str(weight), "cgroup v2 cpu"
                yield "cpu_cores", v2, "cpu.max", f"{quota} {CPU_PERIOD_US}", "cgroup v2 cpu"

    def usage(self, groups: Groups) -> Usage:
        """Counters of the workload; what cannot be read counts as 0."""
        v1, work2 = groups.v1, Path(groups.v2 or "/nonexistent", WORK)
        memory = Path(v1["memory"], WORK) if "memory" in v1 else None
        pids = Path(v1["pids"], WORK, "pids.current") if "pids" in v1 else work2 / "pids.current"
        if "cpuacct" in v1:
            cpu_s = _number(Path(v1["cpuacct"], WORK, "cpuacct.usage")) / 1e9
        else:
            cpu_s = keyed(work2 / "cpu.stat", "usage_usec") / 1e6
        used, peak = ("memory.usage_in_bytes", "memory.max_usage_in_bytes")
        if memory is None:
            memory, used, peak = work2, "memory.current", "memory.peak"
        return Usage(
            cpu_s=cpu_s,
            memory_bytes=_number(memory / used),
            memory_peak_bytes=_number(memory / peak),
            pids=max(0, _number(pids) - sum(map(_is_helper, _pids_below(work2))) + 1),
            oom_kills=keyed(oom_file(groups), "oom_kill"),
        )

    def terminate(self, groups: Groups, grace_s: float) -> None:
        """Sends SIGTERM to every command and waits until they ended, at most
        ``grace_s``. The agent's own helpers block the signal: they don't count."""
        work = Path(groups.v2 or "/nonexistent", WORK)
        deadline = time.monotonic() + grace_s
        asked: set[int] = set()
        while time.monotonic() < deadline:
            pids = {p for p in _pids_below(work) if not _blocks_term(p)}
            if not pids:
                return
            for pid in pids - asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            asked |= pids
            time.sleep(GRACE_POLL_S)

    def kill(self, groups: Groups) -> None:
        """Kills every process of the container and waits until none is left. Raises
        ``Unavailable`` when some outlive the wait."""
        group = Path(groups.v2 or "/nonexistent")
        if not group.exists():
            return
        deadline = time.monotonic() + KILL_WAIT_S
        while _populated(group):
            try:
                (group / "cgroup.kill").write_text("1")
            except OSError as err:
                if err.errno not in (errno.ENOENT, errno.ENODEV):  # the engine removed it
                    raise Unavailable(f"processes cannot be killed: {err}") from err
            _let_die(groups)
            if time.monotonic() > deadline:
                raise Unavailable("processes of the sandbox do not die", cause="runtime")
            time.sleep(POLL_S)

    def remove(self, groups: Groups) -> None:
        """Removes the groups of a container without processes. Raises ``Unavailable``."""
        deadline = time.monotonic() + REMOVE_WAIT_S
        for directory in _unique([*groups.v1.values(), *([groups.v2] if groups.v2 else [])]):
            while not _remove_tree(Path(directory)):
                if time.monotonic() > deadline:
                    raise Unavailable(f"cgroup {directory} cannot be removed", cause="runtime")
                time.sleep(POLL_S)


def oom_file(groups: Groups) -> Path:
    """Where the kernel counts processes of the workload that it killed for memory."""
    if "memory" in groups.v1:
        return Path(groups.v1["memory"], WORK, "memory.oom_control")
    return Path(groups.v2 or "/nonexistent", WORK, "memory.events")


def remove_parent(name: str) -> None:
    """Removes the group ``name`` that an engine made for this node's containers from
    every hierarchy where it is empty; where others live in it, it stays."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            with contextlib.suppress(OSError):
                os.rmdir(f"{mount}/{name}")


def close_fds(fds: CgroupFds) -> None:
    for fd in (*fds.v1, fds.v2, fds.oom):
        if fd is not None:
            os.close(fd)


def _hierarchies() -> tuple[dict[str, str], str | None]:
    """Mount point per wanted v1 controller, and the v2 mount point."""
    v1: dict[str, str] = {}
    v2: str | None = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mount_point = before.split()[4]
        if kind == "cgroup2" and v2 is None:
            v2 = mount_point
        if kind == "cgroup":
            for controller in options.split(","):
                if controller in V1_WANTED:
                    v1.setdefault(controller, mount_point)
    return v1, v2


def _require_kill(v2: str) -> None:
    probe = Path(v2, f"dsec-probe-{os.getpid()}")
    try:
        probe.mkdir()
        found = (probe / "cgroup.kill").exists()
        probe.rmdir()
    except OSError as err:
        raise Unsupported(f"cgroups cannot be made: {err.strerror}", field="cgroups") from err
    if not found:
        raise Unsupported("the kernel has no cgroup.kill (Linux 5.14)", field="cgroups")


def _unique(paths: Any) -> list[str]:
    return list(dict.fromkeys(paths))


def _populated(group: Path) -> bool:
    try:
        return "populated 1" in (group / "cgroup.events").read_text()
    except OSError:
        return False


def _let_die(groups: Groups) -> None:
    """What v1's freezer holds takes its death only when it is thawed."""
    group = Path(groups.v1.get("freezer", "/nonexistent"))
    for state in (group / WORK / "freezer.state", group / "freezer.state"):
        with contextlib.suppress(OSError):
            state.write_text("THAWED")


def _pids_below(directory: Path) -> Iterator[int]:
    for folder, _, _ in os.walk(directory):  # groups come and go meanwhile
        with contextlib.suppress(OSError):
            yield from map(int, Path(folder, "cgroup.procs").read_text().split())


def _is_helper(pid: int) -> bool:
    """Whether it is the agent's launcher, a nest or its spare; they come and go."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text() == "aether\n"
    return False


def _blocks_term(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # gone
    for line in status.splitlines():
        if line.startswith("SigBlk:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return True


def _remove_tree(directory: Path) -> bool:
    try:
        children = [p for p in directory.iterdir() if p.is_dir()]
    except FileNotFoundError:
        return True
    except OSError:
        return False
    gone = [_remove_tree(child) for child in children]
    if not all(gone):
        return False
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def keyed(path: Path, key: str) -> int:
    """The number behind ``key`` in a file of such lines, 0 where there is none."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
