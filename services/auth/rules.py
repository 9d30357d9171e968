"""Who may change what in auth: bounded delegation and quotas inside quotas. Pure.

Owns: the judgements. Does not own: reading what they judge, or doing it. Every
function returns nothing or raises the typed error that names the request's field.

One model for humans, services and agents: what a principal may do depends on its
grants, never on its kind. A node's key is the one exception: it is a machine's and
takes no grants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from schemas.iam import Limits
from services.auth.delegation import known, uncovered
from shared.errors import Conflict, Forbidden, InvalidRequest, QuotaExceeded

NODE_GRANT = "node.*"
"""Held at the root by those who may make keys of nodes and services."""

DIMENSIONS = ("sandboxes", "cores", "memory_mb", "creations_per_s")


def may(held: Collection[str], grant: str, *, project: str) -> None:
    """Raises ``Forbidden`` unless ``held`` (what holds in ``project``) has ``grant``."""
    if uncovered(held, [grant]):
        raise Forbidden(f"{grant} is not held in project {project}", field="project")


def may_give(held: Collection[str], wanted: Iterable[str], *, field: str = "grants") -> None:
    """Raises unless every one of ``wanted`` exists and is held."""
    grants = list(wanted)
    strange = [g for g in grants if not known(g)]
    if strange:
        raise InvalidRequest(f"no such grant: {', '.join(strange)}", field=field)
    missing = uncovered(held, grants)
    if missing:
        raise Forbidden(f"not held, so not to be given: {', '.join(missing)}", field=field)


def may_make_key(
    kind: str, node: str | None, grants: Sequence[str], *,
    held: Collection[str], held_at_root: Collection[str],
) -> None:  # fmt: skip
    """Raises unless a key of ``kind`` with ``grants`` may be made by someone with
    ``held`` in its project and ``held_at_root`` at the root."""
    if (node is None) == (kind == "node"):
        raise InvalidRequest("`node` is for keys of kind node, and needed there", field="node")
    if kind in ("node", "service") and uncovered(held_at_root, [NODE_GRANT]):
        raise Forbidden(f"keys of kind {kind} need {NODE_GRANT} at the root", field="kind")
    if kind == "node" and grants:
        raise InvalidRequest("a node takes no grants", field="grants")
    may_give(held, grants)


def key_expiry(
    now: float, expires_in_s: float | None, *, giver_expires_at: float | None
) -> float | None:
    """When a new key ends, in seconds since the epoch: not after the keys of whoever
    makes it (``None``: they never end). Raises ``Forbidden`` where more was asked."""
    if expires_in_s is None:
        return giver_expires_at
    at = now + expires_in_s
    if giver_expires_at is not None and at > giver_expires_at:
        raise Forbidden("a key does not outlive that of its maker", field="expires_in_s")
    return at


def quota_within(limits: Limits, ancestors: Mapping[str, Limits], *, field: str) -> None:
    """Raises ``QuotaExceeded`` where a limit is over that of an ancestor (by id)."""
    for name in DIMENSIONS:
        asked = getattr(limits, name)
        for project, bound in ancestors.items():
            most = getattr(bound, name)
            if asked is not None and most is not None and asked > most:
                raise QuotaExceeded(
                    f"{name} {asked:g} is over the {most:g} of project {project}",
                    field=f"{field}.{name}",
                    details={"project": project, "limit": most},
                )


def may_delete_project(*, children: int, sandboxes: int, is_root: bool) -> None:
    """Raises unless a project is empty and not the root."""
    if is_root:
        raise Forbidden("the root project stays", field="id")
    if children or sandboxes:
        raise Conflict(
            f"the project still has {children} projects and {sandboxes} sandboxes", field="id"
        )
