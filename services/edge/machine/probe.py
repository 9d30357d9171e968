"""What this machine has and how loaded it is, from the kernel.

Owns: reading /proc and the cgroup of this process. Does not own: what may be committed
(settings), who may start (admission), backends (their drivers).
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from schemas.node import BackendStatus, FeatureReport
from services.edge.admission import Amount, Limits, Measured
from services.edge.drivers.base import BackendReport
from services.edge.settings import Settings

MIB = 1 << 20
RESOURCES = ("cpu", "memory", "io")
NO_LIMIT = 1 << 62
CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores and MiB this process may use."""

    cores: float
    memory_mb: int


def machine() -> Machine:
    """What the machine, or the cgroup around the edge, allows."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _text(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, int(quota[0]) / int(quota[1]))
    memory = min(_meminfo()["MemTotal"], _number(CGROUP / "memory.max"))
    return Machine(cores, memory // MIB)


def limits(settings: Settings) -> Limits:
    """What may be committed on this node, and what must stay free."""
    found = machine()
    cores = settings.capacity_cores or found.cores
    memory_mb = settings.capacity_memory_mb or found.memory_mb
    disk_mb = settings.capacity_disk_mb or _disk_mb(settings.state_path)
    return Limits(
        capacity=Amount(
            cores=cores * settings.overcommit_cpu,
            memory_mb=int(memory_mb * settings.overcommit_memory),
            sandboxes=settings.capacity_sandboxes,
            disk_mb=int(disk_mb * settings.overcommit_disk),
        ),
        memory_floor_mb=settings.memory_floor_mb,
        disk_floor_mb=settings.disk_floor_mb,
        pids_floor=settings.pids_floor,
        pressure={
            "cpu": settings.pressure_cpu,
            "memory": settings.pressure_memory,
            "io": settings.pressure_io,
        },
    )


class Meter:
    """Measures; keeps the last CPU counters for the next difference."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._cpu = _cpu_s()
        self._at = time.monotonic()
        self.last = self.measure()

    def measure(self) -> Measured:
        """The machine now; also kept as :attr:`last`."""
        info = _meminfo()
        cgroup = _number(CGROUP / "memory.max") - _number(CGROUP / "memory.current", 0)
        available = min(info["MemAvailable"], max(0, cgroup))
        self.last = Measured(
            memory_available_mb=available // MIB,
            disk_free_mb=shutil.disk_usage(self._disk).free // MIB,
            pids_free=_pids_free(),
            pressure={name: _pressure(name) for name in RESOURCES},
            memory_used_mb=max(0, info["MemTotal"] - info["MemAvailable"]) // MIB,
            cores_used=self._cores_used(),
        )
        return self.last

    def _cores_used(self) -> float:
        cpu, at = _cpu_s(), time.monotonic()
        used = (cpu - self._cpu) / (at - self._at) if at > self._at else 0.0
        self._cpu, self._at = cpu, at
        return round(max(0.0, used), 3)


def status(report: BackendReport) -> BackendStatus:
    """The wire form of a backend's report."""
    features = {
        name: FeatureReport(supported=feature.supported, reason=feature.reason)
        for name, feature in report.features.items()
    }
    return BackendStatus(supported=report.supported, reason=report.reason, features=features)


def _disk_mb(folder: Path) -> int:
    return shutil.disk_usage(folder).total // MIB


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another kernel, another cgroup version: the file says nothing
        return ""


def _number(path: Path, default: int = NO_LIMIT) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else default


def _meminfo() -> dict[str, int]:
    rows = (line.split() for line in _text(PROC / "meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}


def _cpu_s() -> float:
    fields = [int(n) for n in _text(PROC / "stat").split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def _pressure(resource: str) -> float:
    """Share (0…1) of the last ten seconds in which something waited for it."""
    for word in _text(PROC / "pressure" / resource).split("\n", 1)[0].split():
        if word.startswith("avg10="):
            return float(word.removeprefix("avg10=")) / 100
    return 0.0


def _pids_free() -> int:
    threads = int(_text(PROC / "loadavg").split()[3].split("/")[1])
    free = _number(PROC / "sys/kernel/pid_max", 32_768) - threads
    return min(free, _number(CGROUP / "pids.max") - _number(CGROUP / "pids.current", 0))
