"""Settings of the container backend: every bound has its name here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shared.errors import InvalidRequest

GUEST_BUILD = Path(__file__).resolve().parents[4] / "guest" / "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """``node`` marks what belongs to this edge; ``state_dir`` holds writable layers and
    agent sockets and survives the edge. ``*_s`` are deadlines in seconds."""

    node: str
    state_dir: Path
    docker_url: str | None = None  # None: the standard socket
    pool_size: int = 8  # warm shells kept ready
    pool_max: int = 32  # shells ready or being made, demand included
    refill_concurrency: int = 2
    pool_retry_s: float = 1.0  # after a shell could not be made
    engine_threads: int = 8
    engine_s: float = 30.0  # one call to the engine
    start_s: float = 60.0  # a whole start, waiting for a shell included
    agent_s: float = 10.0  # an agent's answer after its container started
    attach_s: float = 10.0  # the helper that gives a shell its root
    kernel_threads: int = 8
    removals_max: int = 64  # containers that wait for their removal in the background
    removal_concurrency: int = 2
    removal_attempts: int = 5
    death_s: float = 5.0  # finding out why a sandbox died
    message_bytes: int = 2048  # of an agent's last words
    cgroup_parent: str = "dsec"
    idle_layers: int = 64
    swap: str = "host"  # for paused sandboxes: what the machine has, or own: zram, file
    swap_mb: int = 4096  # of own swap
    reclaim_concurrency: int = 2  # sandboxes whose memory is given back at once
    capture_threads: int = 2  # writable layers copied at once
    disks: str = "auto"  # what limits them: auto, quota, image, none
    prefetch_mb: int = 256  # read ahead when a sandbox is resumed, 0: none
    uplink: str = ""  # network namespace the gate connects from, empty: the edge's own
    resolvers: str = ""  # address[@port],…: name servers of the gate, empty: the node's
    services: str = ""  # pypi=host,*.host;npm=…: hosts of mirror services, instead of the public
    roots: str = ""  # PEM file of authorities that the gate trusts beside the node's
    egress: Path = GUEST_BUILD / "bpf" / "egress.o"
    files: Path = GUEST_BUILD / "bpf" / "files.o"
    execs: Path = GUEST_BUILD / "bpf" / "execs.o"
    aether: Path = GUEST_BUILD / "aether"
    attach: Path = GUEST_BUILD / "attach"

    @property
    def sandboxes_dir(self) -> Path:
        return self.state_dir / "sandboxes"

    @property
    def authority(self) -> Path:
        """The gate's own key and certificate."""
        return self.state_dir / "gate.pem"

    @property
    def captures_dir(self) -> Path:
        return self.state_dir / "captures"

    @property
    def disks_dir(self) -> Path:
        """Where limited disks are tried out and prepared."""
        return self.state_dir / "disks"

    @property
    def ground_dir(self) -> Path:
        """What lies below every root."""
        return self.state_dir / "ground"

    @property
    def shells_dir(self) -> Path:
        return self.state_dir / "shells"


def from_options(node: str, state_dir: Path, options: Mapping[str, str]) -> ContainerSettings:
    """Settings from text options (``pool_size`` = ``"8"`` …). Raises ``InvalidRequest``
    naming the option that is unknown or no number."""
    kinds: dict[str, Any] = {"int": int, "float": float, "Path": Path}
    known = {f.name: kinds.get(str(f.type), str) for f in fields(ContainerSettings)}
    given: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known or name in ("node", "state_dir"):
            raise InvalidRequest(f"the container driver has no option {name}", field=name)
        try:
            given[name] = known[name](text)
        except ValueError:
            raise InvalidRequest(f"{name}: {text!r} is not a number", field=name) from None
    return ContainerSettings(node=node, state_dir=state_dir, **given)
