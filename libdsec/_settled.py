"""Operations that were begun before: ended ones as they are recorded, running ones again.

Owns: how they look to whoever began them. Does not own: which they are
(:mod:`libdsec.forward`).
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from libdsec._operation import Data, Operation
from libdsec._wire import WireError

R = TypeVar("R", bound=msgspec.Struct)


class Recorded(Operation[R]):
    """One that has ended. Input was taken then, so it is taken now; nothing is sent."""

    async def start(self) -> None:
        """It was started long ago."""

    async def send(self, data: Data) -> None:
        """Taken."""

    async def end_input(self) -> None:
        """Taken."""


class Followed(Operation[R]):
    """One that was begun elsewhere and may still run. Input comes from its start: what was
    taken before is skipped. Where nobody knows it any more its outcome is unknown."""

    _skip = 0

    def _joined(self, taken: int | None) -> None:
        super()._joined(taken)
        self._skip = taken or 0

    async def send(self, data: Data) -> None:
        """Input that was not taken yet."""
        while self._joining and not self.done:
            await self.changed()
        rest = memoryview(bytes(data))
        dropped = min(self._skip, len(rest))
        self._skip -= dropped
        if len(rest) > dropped and not self._input_ended and not self.done:
            await super().send(rest[dropped:])

    async def end_input(self) -> None:
        """The input has ended, here or before."""
        while self._joining and not self.done:
            await self.changed()
        await super().end_input()

    def finish(self, reply: R) -> None:
        error: WireError | None = getattr(reply, "error", None)
        if error is not None and error.code == "not_found" and error.field == "op_id":
            lost = WireError(
                code="internal", message="nobody knows how this operation ended", is_infra=True,
                details={"outcome": "unknown"},
            )  # fmt: skip
            reply = msgspec.structs.replace(reply, error=lost)
        super().finish(reply)
