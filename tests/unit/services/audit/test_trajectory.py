"""Which trajectory records are kept: one that cannot be costs only itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.audit.trajectory import storable
from shared import ids
from shared.trajectory import Record

GOOD = Record(
    uid=ids.derived("s"), project="team", seq=1, op_id=ids.derived("o"), verb="exec",
    principal="p", at=1.5, lane="main", step=2**53, request=msgspec.Raw(b'{"shell":"a\\u0000"}'),
)  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"lane": "a\0b"}, {"step": 2**63}, {"seq": 2**63}, {"cut": 2**64 - 1}, {"project": "\0"},
    {"verb": "\0"}, {"principal": "\0"}, {"op_id": "\0"}, {"uid": "\0"}, {"uid": "x" * 3000},
    {"step": -1},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD)
def test_what_no_column_takes_is_known(fields: dict[str, Any]) -> None:
    assert storable(GOOD)
    assert not storable(msgspec.structs.replace(GOOD, **fields))
