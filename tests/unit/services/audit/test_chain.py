"""The chain is pure: what is hashed survives storage, and every change shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.audit.chain import GENESIS, canonical, clean, link
from services.audit.records import reporter

keys = st.text(max_size=8)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12)
    | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
)
records = st.dictionaries(keys, values, max_size=6)


def as_jsonb(record: dict[str, Any]) -> dict[str, Any]:
    """What Postgres does to it: numbers lose their exponent, keys their order."""

    def spelled(value: Any) -> Any:
        if isinstance(value, float):
            return json.loads(format(Decimal(repr(value)), "f"))
        if isinstance(value, dict):
            return {k: spelled(value[k]) for k in sorted(value, key=lambda k: (len(k), k))}
        return [spelled(v) for v in value] if isinstance(value, list) else value

    return spelled(record)


def _texts(value: Any) -> Iterator[str]:
    """Every key and string in a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from (text for part in pair for text in _texts(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in _texts(part))


@given(records)
def test_a_record_hashes_the_same_after_storage(record: dict[str, Any]) -> None:
    cleaned = clean(record)
    assert clean(cleaned) == cleaned
    assert canonical(as_jsonb(cleaned)) == canonical(cleaned)
    assert not any("\0" in text for text in _texts(json.loads(canonical(cleaned))))


@given(records, records)
def test_different_records_have_different_hashes(one: Any, other: Any) -> None:
    same = canonical(clean(one)) == canonical(clean(other))
    first, second = (link(GENESIS, 1, "access", canonical(clean(r))) for r in (one, other))
    assert (first == second) == same


@given(records)
def test_number_kind_and_predecessor_are_part_of_the_hash(record: Any) -> None:
    record = canonical(clean(record))
    base = link(GENESIS, 1, "access", record)
    assert base != link(GENESIS, 2, "access", record)
    assert base != link(GENESIS, 1, "violation", record)
    assert base != link(base, 1, "access", record)


def test_only_an_edges_key_is_its_node() -> None:
    assert reporter("dsec.evt.v1.edge.access.n1") == ("edge.n1", "n1")
    assert reporter("dsec.evt.v1.auth.access.n1") == ("auth", None)
