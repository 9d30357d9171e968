"""Streams and durable consumers of the bus.

Owns: what each keeps and who reads it. Does not own: the subjects
(:mod:`schemas.subjects`), declaring them on a server (:mod:`shared.topology`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """A JetStream stream. ``max_age_s`` and ``max_bytes`` bound it; limits retention
    (a work queue would forbid a second listener); a full stream refuses new
    messages, which keeps them in the sender's outbox."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: int
    max_bytes: int
    duplicate_window_s: int = 120


@dataclass(frozen=True)
class Durable:
    """A durable pull consumer. ``name`` and ``filters`` may hold ``{node}``. Work that
    nobody waits for lingers: it leaves the cores to the request that caused it."""

    name: str
    stream: str
    filters: tuple[str, ...]
    owner: str
    ack_wait_s: int = 15
    max_deliver: int = 12
    max_ack_pending: int = 20_000
    batch: int = 256
    linger_s: float = 0.0


GIB = 1 << 30

STREAMS: tuple[Stream, ...] = (
    Stream("DSEC_REQ", ("dsec.req.v1.>",), max_age_s=3_600, max_bytes=2 * GIB),
    Stream("DSEC_CMD", ("dsec.cmd.v1.>",), max_age_s=24 * 3_600, max_bytes=4 * GIB),
    Stream("DSEC_EVT", ("dsec.evt.v1.>",), max_age_s=24 * 3_600, max_bytes=4 * GIB),
    Stream("DSEC_SEC", ("dsec.sec.v1.>",), max_age_s=72 * 3_600, max_bytes=4 * GIB),
    Stream("DSEC_AUDIT", ("dsec.audit.v1.>",), max_age_s=168 * 3_600, max_bytes=2 * GIB),
    # of its own: commands with much output must not fill the stream of observations
    Stream("DSEC_TRJ", ("dsec.trj.v1.*",), max_age_s=72 * 3_600, max_bytes=4 * GIB),
    Stream("DSEC_DLQ", ("dsec.dlq.v1.>",), max_age_s=168 * 3_600, max_bytes=1 * GIB),
)

TERMINAL_EVENTS = tuple(
    f"dsec.evt.v1.sandbox.*.{state}.*" for state in ("stopped", "failed", "rejected", "lost")
)

AUDIT_LINGER_S = 0.2

DURABLES: tuple[Durable, ...] = (
    Durable("auth_requests", "DSEC_REQ", ("dsec.req.v1.>",), owner="auth"),
    Durable("auth_releases", "DSEC_EVT", TERMINAL_EVENTS, owner="auth"),
    Durable(
        "scheduler_commands",
        "DSEC_CMD",
        ("dsec.cmd.v1.sandbox.>", "dsec.cmd.v1.job.>", "dsec.cmd.v1.node.>"),
        owner="scheduler",
    ),
    Durable(
        "scheduler_observations", "DSEC_EVT", ("dsec.evt.v1.edge.sandbox.*",), owner="scheduler"
    ),
    # an import of a large image takes minutes: the handler keeps the message alive, and
    # nothing else is fetched along with it
    Durable(
        "imagesvc_commands", "DSEC_CMD", ("dsec.cmd.v1.image.create.>",), owner="imagesvc", batch=1
    ),
    Durable(
        "imagesvc_snapshots", "DSEC_CMD", ("dsec.cmd.v1.image.snapshot.>",), "imagesvc", batch=1
    ),
    Durable(
        "imagesvc_accesses", "DSEC_EVT", ("dsec.evt.v1.edge.access_profile.*",), owner="imagesvc",
    ),
    Durable(
        "imagesvc_quick", "DSEC_CMD", ("dsec.cmd.v1.image.delete.>", "dsec.cmd.v1.image.tag.>"),
        owner="imagesvc",
    ),
    Durable(
        "audit_access", "DSEC_EVT", ("dsec.evt.v1.*.access.*",), owner="audit", batch=512,
        linger_s=AUDIT_LINGER_S,
    ),
    Durable("audit_reports", "DSEC_CMD", ("dsec.cmd.v1.audit.>",), owner="audit"),
    Durable(
        "audit_trajectory", "DSEC_TRJ", ("dsec.trj.v1.*",), owner="audit", batch=32,
        linger_s=AUDIT_LINGER_S,
    ),
    Durable("audit_violations", "DSEC_SEC", ("dsec.sec.v1.>",), owner="audit", batch=512),
)


def durable(name: str) -> Durable:
    """The durable of that name. Raises ``KeyError`` where the map has none."""
    return {d.name: d for d in DURABLES}[name]


EDGE_DURABLE = Durable("edge_{node}", "DSEC_CMD", ("dsec.cmd.v1.edge.*.{node}",), owner="edge")
"""One per node, made by the scheduler when the node joins."""
