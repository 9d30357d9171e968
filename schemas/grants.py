"""Grants, and what each opens on the bus.

Owns: every grant there is. Does not own: subjects (:mod:`schemas.subjects`), who holds
which and the permissions made of them (services/auth).
"""

from __future__ import annotations

EXEC_GRANTS: dict[str, tuple[str, ...]] = {
    "sandbox.exec": ("exec", "io", "info", "connect", "note"),
    "sandbox.connect": ("connect", "io", "info"),
    "sandbox.files": (
        "io", "info", "file_read", "file_write", "file_stat", "file_list", "file_mkdir",
        "file_remove", "file_move", "file_pack", "file_unpack", "file_watch",
    ),
    "sandbox.get": ("info",),
    "sandbox.trajectory": ("trajectory",),
    "sandbox.set_policy": ("policy", "info"),
    "sandbox.set_timeout": ("verify",),
    "sandbox.pause": ("pause",),
    "sandbox.resume": ("resume",),
}  # fmt: skip
"""Which exec verbs a grant opens."""

BLOB_GRANTS: dict[str, str] = {"image.create": "put", "image.export": "get"}
"""Which transfer verb a grant opens."""

REQ_GRANTS: frozenset[str] = frozenset(
    {
        "sandbox.create", "sandbox.stop", "sandbox.pause", "sandbox.resume",
        "sandbox.set_timeout", "sandbox.snapshot", "sandbox.fork",
        "sandbox.report", "sandbox.tighten", "job.open", "job.renew",
        "project.create", "project.delete", "key.create", "key.delete",
        "grant.create", "grant.delete", "quota.create", "image.create", "image.delete",
        "policy.create", "policy.delete",
        "image.tag", "node.cordon", "node.uncordon", "node.drain",
    }
)  # fmt: skip
GET_GRANTS: frozenset[str] = frozenset(
    {
        "sandbox.get", "sandbox.list", "sandbox.trajectory", "job.list", "project.list",
        "key.list", "grant.list", "quota.get",
        "image.get", "image.list", "image.export", "image.hot_set", "node.list", "audit.read",
        "secret.list", "policy.get", "policy.list",
    }
)  # fmt: skip
PUT_GRANTS: frozenset[str] = frozenset({"secret.set", "secret.remove"})
"""Changes that no stream keeps."""
USE_GRANTS: frozenset[str] = frozenset({"secret.use"})
"""What a create may name; they open nothing on the bus."""
AUDIT_READS = ("list", "rules", "dry_run", "verify", "suggest")
GET_VERBS: dict[str, tuple[tuple[str, str], ...]] = {
    "audit.read": tuple(("audit", verb) for verb in AUDIT_READS),
    "sandbox.trajectory": (("sandbox", "trajectory"), ("sandbox", "output")),
}
"""Grants whose read subjects are spelled otherwise; all others are entity.verb."""

GRANTS: frozenset[str] = (
    REQ_GRANTS | GET_GRANTS | PUT_GRANTS | USE_GRANTS | frozenset(EXEC_GRANTS)
)
"""Every grant there is."""

WHOAMI = ("whoami", "get")
"""A read that every client may do in its own project."""
