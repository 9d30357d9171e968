"""Access records become rows without a detour; what comes out is what the detour made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.audit import Access, AccessRecords
from schemas.base import BadMessage, encode
from services.audit.chain import canonical, clean
from services.audit.records import ACCESS, Recorded, from_accesses, row

texts = st.text(max_size=12)
numbers = st.integers(-(2**53), 2**53)
accesses = st.builds(
    Access,
    id=texts, at=st.floats(-1e15, 1e15) | st.integers(0, 2**40).map(float), project=texts,
    principal=texts, verb=texts, outcome=texts, entity=texts, target=texts, request_id=texts,
    sha256=texts, bytes=numbers, count=numbers, node=texts, trace=texts,
)  # fmt: skip


@given(st.lists(accesses, max_size=3), st.booleans())
def test_a_row_is_what_its_stored_content_says(told: list[Access], of_an_edge: bool) -> None:
    data = encode(AccessRecords(source="liar", records=told))
    service = "edge" if of_an_edge else "auth"
    rows = list(from_accesses(f"dsec.evt.v1.{service}.access.n1", data))
    for access, made in zip(told, rows, strict=True):
        record: dict[str, Any] = msgspec.to_builtins(access)
        record["source"] = "edge.n1" if of_an_edge else "auth"
        if of_an_edge:
            record["node"] = "n1"
        by_name = row(ACCESS, clean(record))
        assert canonical(made.record) == canonical(by_name.record)
        assert made[:-1] == by_name[:-1]


def test_all_fields_of_an_access_are_recorded_in_the_order_of_the_chain() -> None:
    fields = Recorded.__struct_fields__
    assert set(fields) == {*Access.__struct_fields__, "source"}
    assert list(fields) == sorted(fields)


@pytest.mark.parametrize("data", [b"{}", b'{"source":"x","records":[{}]}', b"[", b'{"v":2}'])
def test_what_is_no_message_of_records_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        list(from_accesses("dsec.evt.v1.edge.access.n1", data))
