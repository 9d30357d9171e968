"""Allow lists: exactly what the grants say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.grants import (
    BLOB_GRANTS,
    EXEC_GRANTS,
    GET_GRANTS,
    GET_VERBS,
    GRANTS,
    PUT_GRANTS,
    REQ_GRANTS,
)  # fmt: skip
from schemas.subjects import blob, exec_, get, put, req
from services.auth.delegation import FLEET, expand
from services.auth.permissions import client, node
from shared.errors import QuotaExceeded

ME = "01" + "a" * 24
OTHER = "01" + "b" * 24
projects = st.sampled_from(["p1", "p2", "p3"])
scopes = st.dictionaries(projects, st.lists(st.sampled_from([*sorted(GRANTS), "sandbox.*", "*"])))


def matches(pattern: str, subject: str) -> bool:
    left, right = pattern.split("."), subject.split(".")
    if left[-1] == ">":
        return len(right) >= len(left) and all(
            a in ("*", b) for a, b in zip(left[:-1], right, strict=False)
        )
    return len(left) == len(right) and all(
        a in ("*", b) for a, b in zip(left, right, strict=True)
    )


def allowed(patterns: tuple[str, ...], subject: str) -> bool:
    return any(matches(p, subject) for p in patterns)


@given(scopes, projects, st.sampled_from(sorted(GRANTS)))
def test_a_verb_is_open_exactly_where_it_is_granted(
    given_: dict[str, list[str]], project: str, grant: str
) -> None:
    permissions = client(ME, "home", given_, max_subjects=10_000)
    held = frozenset().union(*map(expand, given_.get(project, ())))
    entity, verb = grant.split(".")
    if grant in REQ_GRANTS:
        expected = grant in held and grant not in FLEET
        for principal in (None, ME):
            subject = req(project, entity, verb, principal)
            assert allowed(permissions.publish, subject) == expected
        assert not allowed(permissions.publish, req(project, entity, verb, OTHER))
    if grant in GET_GRANTS:
        for read in GET_VERBS.get(grant, ((entity, verb),)):
            assert allowed(permissions.publish, get(project, *read, ME)) == (grant in held)
            assert not allowed(permissions.publish, get(project, *read, OTHER))
    if grant in BLOB_GRANTS:
        verb = BLOB_GRANTS[grant]
        assert allowed(permissions.publish, blob(project, verb, ME)) == (grant in held)
        assert not allowed(permissions.publish, blob(project, verb, OTHER))
    if grant in PUT_GRANTS:
        assert allowed(permissions.publish, put(project, entity, verb, ME)) == (grant in held)
        assert not allowed(permissions.publish, put(project, entity, verb, OTHER))
    for opened in EXEC_GRANTS.get(grant, ()):
        expected = any(opened in EXEC_GRANTS[g] for g in held if g in EXEC_GRANTS)
        assert allowed(permissions.publish, exec_(project, "n", "u", opened, ME)) == expected
        assert not allowed(permissions.publish, exec_(project, "n", "u", opened, OTHER))


@given(scopes)
def test_nothing_else_is_open(given_: dict[str, list[str]]) -> None:
    permissions = client(ME, "home", given_, max_subjects=10_000)
    kinds = {tuple(s.split(".")[:2]) for s in permissions.publish}
    assert kinds <= {("dsec", kind) for kind in ("req", "get", "put", "exec", "blob")}
    assert {s.split(".")[3] for s in permissions.publish} <= {*given_, "home"}
    assert get("home", "whoami", "get", ME) in permissions.publish
    for closed in (
        "$JS.API.STREAM.DELETE.DSEC_REQ", "$SYS.REQ.USER.AUTH", "dsec.cmd.v1.sandbox.create.x",
        "dsec.evt.v1.sandbox.p1.running.x", "dsec.rpc.v1.scheduler.nodes", f"_INBOX.{OTHER}.x",
        "dsec.rpc.v1.auth.secrets.n1", put("p1", "secret", "set", OTHER),
    ):  # fmt: skip
        assert not allowed(permissions.publish, closed)
    for closed in (f"_INBOX.{OTHER}.x", f"dsec.out.v1.n.{OTHER}.c.o", "dsec.req.v1.p1.a.b",
                   "dsec.hb.v1.n", "dsec.sec.v1.a.b.n"):  # fmt: skip
        assert not allowed(permissions.subscribe, closed)
    assert allowed(permissions.subscribe, f"_INBOX.{ME}.c.1")
    assert allowed(permissions.subscribe, f"dsec.out.v1.n.{ME}.c.o")


@given(scopes, projects)
def test_events_are_for_those_who_may_see_sandboxes(
    given_: dict[str, list[str]], project: str
) -> None:
    permissions = client(ME, "home", given_, max_subjects=10_000)
    held = frozenset().union(*map(expand, given_.get(project, ())))
    sees = bool(held & {"sandbox.get", "sandbox.list", "sandbox.create"})
    event = f"dsec.evt.v1.sandbox.{project}.running.x"
    assert allowed(permissions.subscribe, event) == sees
    finding = f"dsec.audit.v1.{project}.high.rule"
    assert allowed(permissions.subscribe, finding) == ("audit.read" in held)


def test_at_the_root_one_entry_covers_every_project_and_the_fleet() -> None:
    permissions = client(ME, "root", {"*": ["*"]}, max_subjects=200)
    assert allowed(permissions.publish, req("anything", "sandbox", "create", ME))
    assert allowed(permissions.publish, req("root", "node", "drain", ME))
    assert not allowed(permissions.publish, req("root", "node", "drain", OTHER))


def test_permissions_are_bounded() -> None:
    with pytest.raises(QuotaExceeded):
        client(ME, "home", {f"p{i}": ["*"] for i in range(100)}, max_subjects=1_000)


def test_without_grants_the_lists_are_not_empty() -> None:
    """An empty list would allow everything."""
    permissions = client(ME, "home", {}, max_subjects=10)
    assert permissions.publish == (get("home", "whoami", "get", ME),)
    assert len(permissions.subscribe) == 2


@pytest.mark.parametrize(
    "subject",
    ["dsec.hb.v1.n2", "dsec.evt.v1.edge.sandbox.n2", "dsec.sec.v1.a.b.n2", "dsec.out.v1.n2.p.c.o",
     "dsec.evt.v1.sandbox.p.running.n1", "dsec.rpc.v1.scheduler.join.n2",
     "dsec.rpc.v1.auth.secrets.n2",
     "$JS.API.CONSUMER.MSG.NEXT.DSEC_CMD.edge_n2", "$JS.ACK.DSEC_CMD.edge_n2.1.2.3.4.5",
     "dsec.req.v1.p.sandbox.create", "$JS.API.STREAM.INFO.DSEC_CMD"],
)  # fmt: skip
def test_a_node_is_nobody_else(subject: str) -> None:
    permissions = node(ME, "n1")
    assert not allowed(permissions.publish, subject)


@pytest.mark.parametrize(
    "subject",
    ["dsec.hb.v1.n1", "dsec.evt.v1.edge.sandbox.n1", "dsec.evt.v1.edge.access.n1",
     "dsec.sec.v1.a.b.n1", "dsec.out.v1.n1.p.c.o", "dsec.rpc.v1.scheduler.join.n1",
     "dsec.rpc.v1.auth.secrets.n1",
     "$JS.API.CONSUMER.MSG.NEXT.DSEC_CMD.edge_n1", "$JS.ACK.DSEC_CMD.edge_n1.1.2.3.4.5"],
)  # fmt: skip
def test_a_node_is_itself(subject: str) -> None:
    assert allowed(node(ME, "n1").publish, subject)
    assert allowed(node(ME, "n1").subscribe, "dsec.exec.v1.p.n1.uid.exec.who")
    assert not allowed(node(ME, "n1").subscribe, "dsec.exec.v1.p.n2.uid.exec.who")
