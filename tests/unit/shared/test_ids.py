"""Identifiers: forms, order, the uids of a batch."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import ids

nodes = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
ulids = st.from_regex(r"[0-7][0-9a-hjkmnp-tv-z]{25}", fullmatch=True)


def test_a_new_id_is_a_ulid_and_later_ones_sort_later() -> None:
    made = [ids.new() for _ in range(1000)]
    assert all(ids.is_ulid(i) for i in made)
    assert len(set(made)) == 1000
    assert [i[:10] for i in made] == sorted(i[:10] for i in made)


def test_the_random_part_is_of_all_letters_alike() -> None:
    drawn = Counter("".join(ids.new()[10:] for _ in range(4_000)))
    assert len(drawn) == 32
    assert max(drawn.values()) < 1.3 * min(drawn.values())  # of 2,000 each


@given(nodes, ulids)
def test_a_sandbox_id_carries_its_route(node: str, uid: str) -> None:
    assert ids.split_sandbox_id(ids.sandbox_id(node, uid)) == (node, uid)


@given(st.text(max_size=100))
def test_any_other_text_is_refused(text: str) -> None:
    node, _, uid = text.rpartition("-")
    if ids.is_ulid(uid) and ids.is_token(node):
        assert ids.split_sandbox_id(text) == (node, uid)
    else:
        with pytest.raises(ValueError, match="not a sandbox id"):
            ids.split_sandbox_id(text)


@given(ulids, st.integers(0, 40_000))
def test_a_batchs_uids_are_functions_of_request_and_index(request: str, index: int) -> None:
    uid = ids.item_uid(request, index)
    assert ids.is_ulid(uid)
    assert uid == ids.item_uid(request, index)
    assert uid[:10] == request[:10], "they sort with their request"
    assert (uid == request) == (index == 0)


def test_a_full_batchs_uids_differ() -> None:
    request = ids.new()
    assert len({ids.item_uid(request, i) for i in range(32_768)}) == 32_768


@pytest.mark.parametrize("text", ["", "-a", "a-", "A", "a.b", "a b", "a*", ">", "x" * 64, "a\n"])
def test_what_could_break_out_of_a_subject_is_no_token(text: str) -> None:
    assert not ids.is_token(text)


@pytest.mark.parametrize("text", ["", "8" + "0" * 25, "0" * 25, "i" + "0" * 25, "0" * 26 + "\n"])
def test_what_is_no_ulid(text: str) -> None:
    assert not ids.is_ulid(text)
