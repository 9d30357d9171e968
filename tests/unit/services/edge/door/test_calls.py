"""Subjects at the door."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.exec import ExecRequest
from schemas.subjects import exec_, out
from services.edge.door import calls
from services.edge.door.calls import Call
from services.edge.door.verbs import check_exec
from shared import ids
from shared.errors import InvalidRequest

token = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=20)
CALL = Call("team", "n1", "u1", "exec", "alice")


@given(token, token, token, st.sampled_from(sorted(calls.VERBS)), token)
def test_what_is_built_is_parsed(
    project: str, node: str, uid: str, verb: str, principal: str
) -> None:
    call = Call(project, node, uid, verb, principal)
    assert calls.parse(exec_(project, node, uid, verb, principal)) == call
    assert calls.may_reply(call, out(node, principal, "c1", "o1"))


@given(st.text(max_size=80))
def test_anything_else_is_none_or_whole(subject: str) -> None:
    call = calls.parse(subject)
    assert call is None or subject == exec_(
        call.project, call.node, call.uid, call.verb, call.principal
    )


@pytest.mark.parametrize(
    "subject",
    [
        "dsec.exec.v1.team.n1.u1.exec", "dsec.exec.v1.team.n1.u1.exec.alice.more",
        "dsec.exec.v1.team.n1.u1.format.alice", "dsec.exec.v2.team.n1.u1.exec.alice",
        "dsec.exec.v1..n1.u1.exec.alice", "dsec.req.v1.team.n1.u1.exec.alice", "",
    ],
)  # fmt: skip
def test_other_subjects_are_no_calls(subject: str) -> None:
    assert calls.parse(subject) is None


@pytest.mark.parametrize(
    "reply",
    [
        "", "dsec.out.v1.n1.bob.c.o", "dsec.out.v1.n2.alice.c.o", "dsec.out.v1.n1.alice.c",
        "dsec.out.v1.n1.alice.c.o.x", "dsec.out.v1.n1.alice.c.*", "dsec.out.v1.n1.alice.>.o",
        "dsec.out.v1.n1.alice..o", "dsec.hb.v1.n1", "dsec.evt.v1.edge.sandbox.n1",
        "dsec.out.v1.n1.alicex.c.o",
    ],
)  # fmt: skip
def test_answers_go_nowhere_else(reply: str) -> None:
    assert not calls.may_reply(CALL, reply)


def test_a_fingerprint_covers_who_what_and_where() -> None:
    same = calls.fingerprint(CALL, b"body")
    assert same == calls.fingerprint(CALL, b"body")
    others = [
        calls.fingerprint(CALL, b"bodz"),
        calls.fingerprint(Call("team", "n1", "u2", "exec", "alice"), b"body"),
        calls.fingerprint(Call("team", "n1", "u1", "info", "alice"), b"body"),
        calls.fingerprint(Call("team", "n1", "u1", "exec", "bob"), b"body"),
    ]
    assert len({same, *others}) == 5


def test_a_variable_with_nul_is_named() -> None:
    request = ExecRequest(op_id=ids.new(), shell="true", env={"A": "x", "B": "a\0b"})
    with pytest.raises(InvalidRequest) as caught:
        check_exec(request)
    assert caught.value.field == "env.B"
