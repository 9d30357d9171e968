"""Access records on a bus that answers late: none is lost, none is told twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from schemas.audit import Access, AccessRecords
from schemas.base import decode
from services.auth.access import AccessBuffer
from shared import ids
from shared.bus import Bus, Outgoing
from shared.errors import Unavailable


class Stream:
    """Keeps what comes, a message id once; ``late`` times it stores and does not say so."""

    def __init__(self, late: int = 0) -> None:
        self.late = late
        self.kept: dict[str, bytes] = {}

    async def store(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            assert message.msg_id is not None
            self.kept.setdefault(message.msg_id, message.data)
        if self.late:
            self.late -= 1
            raise Unavailable("no acknowledgement")

    def records(self) -> list[str]:
        return [r.id for data in self.kept.values() for r in decode(data, AccessRecords).records]


def record() -> Access:
    return Access(
        id=ids.new(), at=0.0, project="p", principal="p", verb="whoami.get", outcome="ok"
    )


async def test_records_that_come_while_others_are_sent_again_are_not_lost() -> None:
    stream = Stream(late=2)
    buffer = AccessBuffer(cast("Bus", stream))
    told = [record() for _ in range(6)]
    for number in range(0, 6, 2):
        await buffer.add(told[number])
        await buffer.add(told[number + 1])
        if stream.late:
            with pytest.raises(Unavailable):
                await buffer._flush()
    while buffer._waiting:
        await buffer._flush()
    assert stream.records() == [r.id for r in told]
