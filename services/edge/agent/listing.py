"""What an agent says of the operations it knows.

Owns: the form of a record. Does not own: asking for them
(:mod:`services.edge.agent.client`).
"""

from __future__ import annotations

from dataclasses import dataclass

from services.edge.agent.wire import Fields, ProtocolError, Tag


@dataclass(frozen=True, slots=True)
class Listed:
    """An operation the agent knows. ``taken``: bytes of input it was given; ``terminal``:
    it is on one; ``base``: bytes of stdout and stderr before those that are retained."""

    id: int
    key: str
    done: bool
    taken: int = 0
    terminal: bool = False
    base: tuple[int, int] = (0, 0)


def listed(record: Fields) -> Listed:
    """A record of a LISTING. Raises :class:`ProtocolError` for an id that is none."""
    number = record.number(Tag.OP_ID)
    if not 0 < number < 1 << 32:
        raise ProtocolError("an operation has an id of 32 bits")
    return Listed(
        number, record.text(Tag.KEY), record.text(Tag.STATE) == "done",
        record.number(Tag.TAKEN), bool(record.number(Tag.ROWS)),
        (record.number(Tag.BASE_OUT), record.number(Tag.BASE_ERR)),
    )  # fmt: skip
