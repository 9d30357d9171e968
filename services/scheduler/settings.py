"""The scheduler's settings: every bound and deadline it has."""

from __future__ import annotations

from shared.settings import Common

KEEP_LEAST_S = 25 * 3600.0
"""Longer than a create that comes again may be on its way in its stream."""


class Settings(Common, kw_only=True):
    """``DSEC_<FIELD>``. Times in seconds."""

    pg_dsn: str
    redis_url: str

    # placement
    placement_choices: int = 2
    """k of power-of-k."""
    placement_attempts: int = 4
    """Nodes tried for one sandbox before it is rejected."""
    default_cores: float = 0.0
    default_memory_mb: int = 0
    """Reserved where a spec gives neither a limit nor a request."""
    view_refresh_s: float = 0.5
    burst_share_s: float = 90.0
    """How long burst's portion counts without a word of it: three of its repetitions
    (``burst_publish_s``)."""
    retry_after_s: float = 5.0
    """The hint to a client that found no capacity."""

    refused_again_s: float = 1.0
    """Between attempts at nodes that refused for want of capacity; doubles thrice."""
    wait_rows: int = 4096
    """Creates that may wait for room, in all; more are refused at once."""
    wait_project_rows: int = 2048
    """Of them, those of one project."""
    wait_look_s: float = 0.5
    """Between looks whether there is room for those that wait."""

    # watcher
    silence_s: float = 5.0
    """A node not heard of for so long is lost."""
    lost_grace_s: float = 15.0
    """Its sandboxes are given up so much later."""
    node_write_s: float = 2.0
    """Least time between writes of an unchanged node."""
    load_write_s: float = 0.2

    # reconciler
    reconcile_s: float = 1.0
    reconcile_rows: int = 500
    """Rows of one pass' transaction."""
    start_again_s: float = 5.0
    """A placed sandbox without an observation is sent again."""
    op_again_s: float = 5.0
    """A pause, resume or stop without an answer is sent again."""
    missing_s: float = 10.0
    """A sandbox that its joining edge does not have is given up after it."""
    drain_grace_s: float = 5.0
    """What a draining node's sandboxes get between the request and the kill."""
    topology_s: float = 15.0
    """Between looks at streams and durables, beside those after reconnects."""
    lost_layers_s: float = 86_400.0
    """Layers of sandboxes lost since are not collected: the node may only be cut off."""
    resolve_s: float = 4.0
    """Wait for imagesvc."""
    lease_late_s: float = 5.0
    """How late a renewal may be processed before its job counts as lost."""
    job_keep_s: float = 30 * 86_400.0
    """A job without a lease and without live sandboxes is forgotten after it."""
    node_keep_s: float = 7 * 86_400.0
    """A lost node without sandboxes that nobody cordoned is forgotten after it."""
    forget_s: float = 60.0
    """Between removals of what is past its use."""
    op_keep_s: float = 3600.0
    """An operation that nobody completed is forgotten after it."""
    keep_ended_s: float = 31 * 86_400.0
    """How long a sandbox that ended, its history and its request are known: longer than
    auth remembers request ids (``auth_request_keep_s``), or a request that is repeated
    in between would start a second sandbox; at least ``KEEP_LEAST_S``."""

    def __post_init__(self) -> None:
        if self.keep_ended_s < KEEP_LEAST_S:
            raise ValueError(f"keep_ended_s: at least {KEEP_LEAST_S:g} s")
