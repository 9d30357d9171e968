"""The SDK makes identifiers as the services do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libdsec import InvalidRequest, _ids
from shared import ids


@given(st.integers(0, 40_000))
def test_uids_of_a_batch_are_the_services_uids(index: int) -> None:
    request = ids.new()
    uid = _ids.item_uid(request, index)
    assert uid == ids.item_uid(request, index)
    assert ids.is_ulid(uid)


def test_new_ids_are_ulids_and_differ() -> None:
    made = {_ids.new() for _ in range(1000)}
    assert len(made) == 1000
    assert all(ids.is_ulid(one) for one in made)


@given(st.text(max_size=40))
def test_both_sides_know_the_same_tokens(text: str) -> None:
    assert _ids.is_token(text) == ids.is_token(text)
    assert _ids.is_ulid(text) == ids.is_ulid(text)


def test_a_uid_is_found_in_a_public_id() -> None:
    uid = ids.new()
    assert _ids.uid_of(ids.sandbox_id("node-1", uid)) == uid == _ids.uid_of(uid)
    with pytest.raises(InvalidRequest):
        _ids.uid_of("node-1")
