"""Which trajectory records are kept: one that cannot be costs only itself."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from schemas.base import encode
from schemas.subjects import trj
from services.audit.trajectory import Trajectories, storable
from shared import ids
from shared.trajectory import Record, Records

GOOD = Record(
    uid=ids.derived("s"), project="team", seq=1, op_id=ids.derived("o"), verb="exec",
    principal="p", at=1.5, lane="main", step=2**53, request=msgspec.Raw(b'{"shell":"a\\u0000"}'),
)  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"lane": "a\0b"}, {"step": 2**63}, {"seq": 2**63}, {"cut": 2**64 - 1}, {"project": "\0"},
    {"verb": "\0"}, {"principal": "\0"}, {"op_id": "\0"}, {"uid": "\0"}, {"uid": "x" * 3000},
    {"step": -1},
]  # fmt: skip


class Rows:
    """A database that keeps the parameters of its statements."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Rows]:
        yield self

    async def execute(self, _: object, parameters: dict[str, Any]) -> None:
        self.told.append(parameters)


@pytest.mark.parametrize("fields", BAD)
def test_what_no_column_takes_is_known(fields: dict[str, Any]) -> None:
    assert storable(GOOD)
    assert not storable(msgspec.structs.replace(GOOD, **fields))


async def test_a_record_that_cannot_be_kept_takes_no_other_with_it() -> None:
    db: Any = Rows()
    bad = [msgspec.structs.replace(GOOD, **{"seq": 2} | fields) for fields in BAD]
    last = msgspec.structs.replace(GOOD, seq=3)
    data = encode(Records(node="n1", records=[GOOD, *bad, last]))
    message: Any = SimpleNamespace(subject=trj("n1"), data=data)
    await Trajectories(db, keep_s=60, max_bytes=1 << 30).told([message])
    assert db.told[0]["seq"] == [1, 3]
    assert db.told[0]["request"][0] == bytes(GOOD.request)
