"""Settings of the layer service: every bound it has."""

from __future__ import annotations

from pathlib import Path

from shared.blobs.layout import DATA_CHUNK_BYTES
from shared.blobs.opening import StoreSettings
from shared.errors import InvalidRequest


class Settings(StoreSettings, kw_only=True):
    """From ``DSEC_<FIELD>``."""

    layers_dir: str = "/var/lib/dsec/layers"
    """Cache and control socket; edges of this machine are told the same folder."""

    layers_cache_bytes: int = 20 * 1024**3
    """All of the cache: metadata images and chunks."""
    layers_reserve_bytes: int = 512 * 1024**2
    """What the cache leaves free on its disk; below that it does not grow."""
    layers_meta_bytes_max: int = 2 * 1024**3
    """The biggest metadata image that is fetched."""

    layers_unit_bytes: int = 512 * 1024
    """Fetched at once on demand: whole chunks."""
    layers_ahead_bytes: int = 1024 * 1024
    """Fetched at once, at most, of what is wanted first: whole chunks."""
    layers_fetches: int = 16
    """Fetches at a time, those ahead included; each is held in memory."""
    layers_prefetches: int = 12
    """Of these for prefetching at most."""
    layers_hot_chunks: int = 64
    """Chunks in memory: what is read in pieces, and all there is when the disk is full."""
    layers_behind_bytes: int = 32 * 1024 * 1024
    """What may be in memory alone, to be written when programs have begun."""

    layers_read_deadline_s: float = 30.0
    """From a read's arrival to its data or EIO, all repetitions included."""
    layers_prepare_deadline_s: float = 30.0
    """For a layer's metadata."""
    layers_request_s: float = 10.0
    """One request to the store."""
    layers_request_retries: int = 1
    """By the store's library, at once; the reader repeats until its deadline."""
    layers_hold_s: float = 60.0
    """A prepared layer counts as in use for so long, until it is opened."""

    layers_profile_s: float = 30.0
    """What is read so soon after a layer was first opened is its profile."""
    layers_profile_chunks_max: int = 1024

    layers_fuse_fd: int = -1
    layers_mount_fd: int = -1
    layers_keeper_fd: int = -1
    layers_connection: str = ""
    """Given by the keeper to its worker."""

    def __post_init__(self) -> None:
        for name in ("layers_unit_bytes", "layers_ahead_bytes"):
            value = getattr(self, name)
            if value < DATA_CHUNK_BYTES or value % DATA_CHUNK_BYTES:
                text = f"DSEC_{name.upper()}: a multiple of {DATA_CHUNK_BYTES}"
                raise InvalidRequest(text, field=name)

    @property
    def root(self) -> Path:
        return Path(self.layers_dir)

    @property
    def chunks_per_unit(self) -> int:
        return self.layers_unit_bytes // DATA_CHUNK_BYTES

    @property
    def chunks_ahead(self) -> int:
        return self.layers_ahead_bytes // DATA_CHUNK_BYTES
