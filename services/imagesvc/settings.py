"""Settings of imagesvc: every bound it has."""

from __future__ import annotations

from services.imagesvc.intake import Allowed
from shared.blobs.opening import StoreSettings


class Settings(StoreSettings, kw_only=True):
    """From ``DSEC_<FIELD>``."""

    pg_dsn: str
    image_roots: str = ""
    """Folders, divided by ``:``, below which clients may name paths to import. They
    must not be writable by those who may not read everything on this machine."""
    image_docker_url: str | None = None
    """The container engine for imports of local images; default: the environment's."""
    image_docker: bool = True
    """Whether local images of a container engine may be imported at all."""
    image_registries: str = ""
    """Hosts, divided by ``,``, of registries that images may come from; ``http://host``
    for one without TLS, ``*`` for all."""
    image_registry_accounts: str | None = None
    """A file of registries' passwords as container tools keep it: ``{"auths": …}``."""
    image_builds: bool = False
    """Whether clients may have Dockerfiles built by the container engine here."""
    image_build_network: str = "none"
    """The engine's network for builds."""
    image_build_memory_bytes: int = 4 * 1024**3
    image_transfers: str = "/var/lib/dsec/imagesvc/transfers"
    """Uploads and exports; several imagesvc share it."""
    image_scratch: str = "/var/lib/dsec/imagesvc/scratch"
    """Work in progress of imports into a remote store: room for one image each."""
    image_scrub: str = "{}"
    """What a scrub leaves out besides, as JSON: project → absolute paths with ``*`` and
    ``**``. It holds in the project and all below it."""
    image_verify: bool = True
    """Mount and compare every new layer: needs root and a kernel with EROFS."""

    image_commands: int = 8
    """Imports taken at a time; those over ``image_parallel`` wait for their turn."""
    image_small_bytes: int = 64 * 1024**2
    """A folder or file of at most this much data does not wait behind longer imports."""
    image_parallel: int = 2
    """Imports at a time."""
    image_import_s: float = 4 * 3_600.0
    """Longest import, however slowly a registry or a build goes on."""
    image_collapse_bytes: int = 3 * 1024**3
    """Consecutive layers of an image become one up to this much data."""
    image_entries_max: int = 2_000_000
    """Entries of one layer."""
    image_unpacked_bytes_max: int = 256 * 1024**3
    """Data of one image, and what its compressed layers may unpack to."""
    image_upload_bytes_max: int = 64 * 1024**3
    image_uploads_bytes_max: int = 256 * 1024**3
    """Of all uploads that wait to be imported."""
    image_exports_bytes_max: int = 256 * 1024**3
    """Of all exports that wait to be fetched."""
    image_transfer_keep_s: float = 24 * 3_600.0
    """How long an untouched upload or export stays."""
    image_names_max: int = 64
    """Names in one environment."""
    image_list_max: int = 10_000
    """Images in one answer."""
    image_request_keep_s: float = 30 * 86_400.0
    """How long a request id is remembered."""
    image_lease_s: float = 6 * 3_600.0
    """How long storing an import's layers may take; then collection may have them."""
    image_gc_s: float = 3_600.0
    """Between rounds of garbage collection."""
    image_gc_age_s: float = 24 * 3_600.0
    """How long nothing must have needed a layer: far longer than from resolving an
    image to its sandbox standing in the scheduler's table."""
    image_prune_s: float = 3_600.0
    """Between removals of old request ids."""
    image_prune_rows: int = 1_000
    """Rows of one of their transactions."""
    progress_s: float = 0.5
    """Between two reports of an import's progress."""

    @property
    def image_allowed(self) -> Allowed:
        """What clients may import."""
        return Allowed(self.image_roots, self.image_registries, self.image_builds)
