"""Settings of one edge. Owns the names; :mod:`shared.settings` reads them."""

from __future__ import annotations

import re
from pathlib import Path

from shared import ids
from shared.errors import InvalidRequest
from shared.settings import Common

MAX_LOGGED_BYTES = 1 << 20
"""A record of the trajectory log is one message of the bus."""
_KEY = re.compile(r"^dsec_([0-9a-z]{26})_")


class Settings(Common, kw_only=True):
    """``DSEC_<NAME>`` of each field. ``nats_token`` is the node's key. ``drivers``
    are names, comma separated. ``capacity_*`` replace what the probe finds; a
    factor of overcommit multiplies them. Floors are what must stay free for a
    start to be admitted; ``pressure_*`` are the shares of stalled time (0…1) over
    which nothing starts. ``routes``: addresses that sandboxes may be given, as
    ``name=host:port`` with commas between; the bus is one by the name ``bus``.
    ``verifying_max_s``: how long a verifier may hold a sandbox, and its end off."""

    node: str
    state_dir: str = "/var/lib/dsec/edge"
    drivers: str = "container"
    store_url: str = "file:///var/lib/dsec/store"
    layers_dir: str = "/var/lib/dsec/layers"
    pool: str = "onprem"

    capacity_cores: float | None = None
    capacity_memory_mb: int | None = None
    capacity_disk_mb: int | None = None
    capacity_sandboxes: int = 2_000
    overcommit_cpu: float = 50.0
    overcommit_memory: float = 6.0
    overcommit_disk: float = 4.0
    memory_floor_mb: int = 512
    disk_floor_mb: int = 1_024
    pids_floor: int = 1_024
    pressure_cpu: float = 0.98
    pressure_memory: float = 0.4
    pressure_io: float = 0.9

    start_concurrency: int = 16
    stop_timeout_s: float = 30.0
    recover_timeout_s: float = 20.0
    verifying_max_s: float = 3_600.0
    ops_per_sandbox: int = 64
    ops_per_node: int = 2_048
    connections_per_sandbox: int = 128
    routes: str = ""
    trajectory: bool = True
    trajectory_output_bytes: int = 1024 * 1024
    trajectory_request_bytes: int = 256 * 1024

    def __post_init__(self) -> None:
        if not ids.is_token(self.node):
            raise InvalidRequest(f"DSEC_NODE: {self.node!r} is not a token", field="node")
        if self.pool not in ("onprem", "cloud"):
            raise InvalidRequest("DSEC_POOL: onprem or cloud", field="pool")
        if not self.store_url.startswith(("file:///", "s3://")):
            raise InvalidRequest("DSEC_STORE_URL: file:///path or s3://…", field="store_url")
        for name in ("trajectory_output_bytes", "trajectory_request_bytes"):
            if not 0 < getattr(self, name) <= MAX_LOGGED_BYTES:
                text = f"DSEC_{name.upper()}: 1 to {MAX_LOGGED_BYTES}"
                raise InvalidRequest(text, field=name)
        if not self.driver_names:
            raise InvalidRequest("DSEC_DRIVERS: at least one driver", field="drivers")

    @property
    def driver_names(self) -> tuple[str, ...]:
        """The drivers to be used, in order, each once."""
        names = (name.strip() for name in self.drivers.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def state_path(self) -> Path:
        """Where the journal and the drivers' state live."""
        return Path(self.state_dir)

    @property
    def layers_path(self) -> Path:
        """The folder of the layer service, for a remote store."""
        return Path(self.layers_dir)

    @property
    def principal(self) -> str:
        """Who the bus takes this edge for: said by its key, else its node name."""
        match = _KEY.match(self.nats_token or "")
        return match.group(1) if match else self.node
