"""Create requests: judged per item, equal specs shared, commands in bounded pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.base import WireError
from services.auth import creates
from services.auth.creates import PIECE_ITEMS, Refusal
from shared import ids
from shared.errors import InvalidRequest

GOOD, OTHER, BAD = {"backend": "fake"}, {"backend": "fake", "job": "j"}, {"backend": "container"}


def read(*specs: dict[str, Any], **more: Any) -> creates.Create:
    body = {"request_id": ids.new(), "specs": list(specs), **more}
    return creates.read("p", "who", json.dumps(body).encode())


def pieces(create: creates.Create) -> list[Any]:
    return list(creates.pieces(create, expires_at=1.0, asked_at=1.0, reply_to=None, trace=None))


@given(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=40))
def test_items_keep_their_order_spec_and_error(kinds: list[int]) -> None:
    create = read(*[(GOOD, OTHER, BAD)[k] for k in kinds])
    (command,) = pieces(create)
    assert command.total == len(kinds)
    for index, (kind, item) in enumerate(zip(kinds, command.items, strict=True)):
        assert (item.index, item.uid) == (index, create.uid(index))
        if kind == 2:
            assert item.refused is not None
            assert item.spec == -1
        else:
            assert item.refused is None
            assert command.specs[item.spec].job == (None if kind == 0 else "j")
    assert len(command.specs) == len(set(kinds) - {2})
    covered = [i for start, stop, _ in create.runs() for i in range(start, stop)]
    assert covered == [i for i, k in enumerate(kinds) if k != 2]


def test_a_denied_spec_refuses_its_items_alone() -> None:
    create = read(GOOD, OTHER, GOOD)
    error = WireError(code="forbidden", message="no", field="routes")
    create.deny(create.spec_of[0], error)
    assert create.refused == {0: error, 2: error}
    assert [index for index, _, _ in create.runs()] == [1]
    (command,) = pieces(create)
    assert [item.refused for item in command.items] == [error, None, error]
    every = read(GOOD, count=3)
    every.deny(0, error)
    assert list(every.runs()) == [] and set(every.refused) == {0, 1, 2}


@pytest.mark.parametrize("count", [1, PIECE_ITEMS, PIECE_ITEMS + 1, 4096])
def test_large_requests_go_in_pieces_that_cover_every_item_once(count: int) -> None:
    create = read(GOOD, count=count)
    parts = pieces(create)
    assert all(len(p.items) <= PIECE_ITEMS for p in parts)
    assert [i.index for p in parts for i in p.items] == list(range(count))
    assert {p.total for p in parts} == {count}
    assert len({p.request_id for p in parts}) == 1


def test_large_specs_are_spread_over_pieces() -> None:
    large = [
        {"backend": "fake", "env": {"A": "x" * 100_000, "I": str(i)}} for i in range(12)
    ]
    parts = pieces(read(*large))
    assert len(parts) > 1
    for part in parts:
        assert sum(len(s.env["A"]) for s in part.specs) <= creates.PIECE_BYTES
    indices = [part.specs[i.spec].env["I"] for part in parts for i in part.items]
    assert indices == [str(i) for i in range(12)]


def test_one_bad_spec_times_count_refuses_every_item() -> None:
    create = read(BAD, count=3)
    assert sorted(create.refused) == [0, 1, 2]
    assert list(create.runs()) == []


def test_what_a_quota_refused_is_marked() -> None:
    create = read(GOOD, count=4)
    error = WireError(code="quota_exceeded", message="full")
    create.refuse([Refusal(2, 4, error)])
    assert list(create.runs()) == [(0, 2, 0)]
    assert {i.index for p in pieces(create) for i in p.items if i.refused} == {2, 3}


def test_content_is_what_is_asked_not_how_long_one_waits() -> None:
    first, same, other = read(GOOD), read(GOOD, timeout_s=5.0), read(GOOD, count=2)
    assert first.digest == same.digest != other.digest
    assert read(GOOD, GOOD).digest != other.digest


def test_count_goes_with_one_spec() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(GOOD, GOOD, count=2)
    assert caught.value.field == "count"


def test_a_fork_has_one_spec_that_names_its_source() -> None:
    source = "01k2h7v8n0abcdefghjkmnpqrs"

    def fork(*specs: dict[str, Any]) -> creates.Create:
        body = {"request_id": ids.new(), "specs": list(specs), "count": 3}
        return creates.read("p", "who", json.dumps(body).encode(), fork=True)

    made = fork({**GOOD, "source": source, "node": "where-it-was"})
    assert [made.specs[i].source for i in made.spec_of] == [source] * 3
    assert {e.field for e in fork(GOOD).refused.values()} == {"source"}
    with pytest.raises(InvalidRequest) as refused:
        fork({**GOOD, "source": source}, {**OTHER, "source": source})
    assert refused.value.field == "specs"
