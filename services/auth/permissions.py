"""From grants to the subjects a connection may use. Pure.

Owns: the allow lists of clients and nodes. Does not own: signing them
(:mod:`services.auth.natsjwt`), finding the grants (:mod:`services.auth.iam_store`).

An empty allow list means *everything* to the server, so both lists always have
entries of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.grants import (
    BLOB_GRANTS,
    EXEC_GRANTS,
    GET_GRANTS,
    GET_VERBS,
    PUT_GRANTS,
    REQ_GRANTS,
    WHOAMI,
)  # fmt: skip
from schemas.streams import EDGE_DURABLE
from schemas.subjects import blob, exec_, get, put, req, secrets, trj
from schemas.trajectory import output_of
from services.auth.delegation import FLEET, expand
from shared.errors import QuotaExceeded

ANY_PROJECT = "*"
"""Scope of a grant at the root: one entry instead of one per project."""

_EVENT_GRANTS = frozenset({"sandbox.get", "sandbox.list", "sandbox.create"})


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that may be published to and subscribed to; neither is ever empty."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def client(
    principal: str, home: str, scopes: Mapping[str, Iterable[str]], *, max_subjects: int
) -> Permissions:
    """Permissions of a user, service or agent. ``scopes``: grants by project, one
    entry per project of each subtree (or :data:`ANY_PROJECT`). Raises
    ``QuotaExceeded`` where they are more than ``max_subjects``."""
    publish = {get(home, *WHOAMI, principal)}
    subscribe = {f"_INBOX.{principal}.>", f"dsec.out.v1.*.{principal}.>"}
    for project, grants in scopes.items():
        verbs = frozenset().union(*map(expand, grants))
        if project != ANY_PROJECT:
            verbs -= FLEET
        for verb in verbs:
            publish.update(_publish(project, verb, principal))
        if verbs & _EVENT_GRANTS:
            subscribe.add(f"dsec.evt.v1.sandbox.{project}.>")
        if "audit.read" in verbs:
            subscribe.add(f"dsec.audit.v1.{project}.>")
        if len(publish) + len(subscribe) > max_subjects:
            raise QuotaExceeded(
                f"the grants of {principal} need more than {max_subjects} subjects",
                field="grants",
            )
    return Permissions(tuple(sorted(publish)), tuple(sorted(subscribe)))


def _publish(project: str, grant: str, principal: str) -> Iterable[str]:
    entity, verb = grant.split(".")
    if grant in REQ_GRANTS:
        yield req(project, entity, verb)
        yield req(project, entity, verb, principal)
    if grant in GET_GRANTS:
        for read in GET_VERBS.get(grant, ((entity, verb),)):
            yield get(project, *read)
            yield get(project, *read, principal)
    if grant in PUT_GRANTS:
        yield put(project, entity, verb, principal)
    if grant in BLOB_GRANTS:
        yield blob(project, BLOB_GRANTS[grant], principal)
    for opened in EXEC_GRANTS.get(grant, ()):
        yield exec_(project, "*", "*", opened, principal)


def node(principal: str, name: str) -> Permissions:
    """Permissions of the edge of node ``name``: it speaks only as itself."""
    durable = EDGE_DURABLE.name.format(node=name)
    stream = EDGE_DURABLE.stream
    return Permissions(
        publish=(
            f"dsec.hb.v1.{name}",
            f"dsec.evt.v1.edge.*.{name}",
            f"dsec.sec.v1.*.*.{name}",
            trj(name),
            f"dsec.out.v1.{name}.>",
            f"dsec.rpc.v1.scheduler.join.{name}",
            output_of(name),
            secrets(name),
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}",
            f"$JS.API.CONSUMER.INFO.{stream}.{durable}",
            f"$JS.ACK.{stream}.{durable}.>",
        ),
        subscribe=(f"dsec.exec.v1.*.{name}.>", f"_INBOX.{principal}.>"),
    )
