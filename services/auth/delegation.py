"""What a grant covers, and what its holder may hand on. Pure.

Owns: the meaning of ``entity.verb``, ``entity.*`` and ``*``, and that a grant in a
project holds in everything below it. Does not own: bus permissions
(:mod:`services.auth.permissions`), limits (:mod:`services.auth.rules`).

Only a wildcard covers a wildcard: whoever holds every verb of today one by one does
not hold the verbs of tomorrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from schemas.grants import GRANTS
from shared import ids

ROUTE = "route"
"""``route.<name>``: sandboxes may be given this route; operators choose the names."""
ENTITIES = frozenset(g.partition(".")[0] for g in GRANTS) | {ROUTE}
FLEET = frozenset({"node.cordon", "node.uncordon", "node.drain", "image.hot_set"})
"""Verbs about machines and what all run, which belong to no project: they hold at the
root only."""


def known(grant: str) -> bool:
    """Whether ``grant`` names something that exists."""
    entity, _, verb = grant.partition(".")
    if grant == "*" or grant in GRANTS or (verb == "*" and entity in ENTITIES):
        return True
    return entity == ROUTE and ids.is_token(verb)


def expand(grant: str) -> frozenset[str]:
    """The verbs that ``grant`` opens today."""
    return frozenset(g for g in GRANTS if covers(grant, g))


def covers(held: str, wanted: str) -> bool:
    """Whether ``held`` includes ``wanted``; each may be a wildcard."""
    if held in ("*", wanted):
        return True
    entity, _, verb = held.partition(".")
    return verb == "*" and wanted != "*" and wanted.partition(".")[0] == entity


def holds(held: Iterable[str], wanted: str) -> bool:
    """Whether one of ``held`` includes ``wanted``."""
    return any(covers(grant, wanted) for grant in held)


def uncovered(held: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Those of ``wanted`` that nothing in ``held`` includes, in order."""
    have = tuple(held)
    return [grant for grant in wanted if not holds(have, grant)]


def effective(path: Sequence[str], grants: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """What holds in the project whose ids from the root are ``path``, given grants by
    project: those of the project itself and of everything above it."""
    return frozenset(g for project in path for g in grants.get(project, ()))
