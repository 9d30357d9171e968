"""Values of secrets, for as long as they are used.

Owns: asking auth for them, when to ask again, what counts while auth is away. Does not
own: who may have them (auth judges it at every question), putting them anywhere. They
are in this process's memory only: in no journal, no log, no sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.secret import GivenSecret, SecretsGiven, SecretsWanted
from schemas.subjects import secrets
from services.edge.link import Link
from shared.clock import Clock
from shared.errors import Unavailable

FRESH_S = 2.0
"""So long values are used without a question: a new one is in use after it."""
KEPT_S = 600.0
"""So long they are used while auth does not answer."""
ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class _Kept:
    values: Mapping[str, GivenSecret]
    asked_s: float


class Vault:
    """Call it with project and uid."""

    def __init__(self, *, node: str, link: Link, clock: Clock) -> None:
        self._node, self._link, self._clock = node, link, clock
        self._kept: dict[str, _Kept] = {}
        self._asking: dict[str, asyncio.Task[Mapping[str, GivenSecret]]] = {}

    async def __call__(self, project: str, uid: str) -> Mapping[str, GivenSecret]:
        """The values that a sandbox is bound to. Raises ``DsecError``."""
        kept = self._kept.get(uid)
        if kept is not None and self._clock.monotonic() - kept.asked_s < FRESH_S:
            return kept.values
        task = self._asking.get(uid)
        if task is None:
            task = self._asking[uid] = asyncio.ensure_future(self._ask(project, uid))
            task.add_done_callback(lambda _: self._asking.pop(uid, None))
        return await asyncio.shield(task)

    async def _ask(self, project: str, uid: str) -> Mapping[str, GivenSecret]:
        now = self._clock.monotonic()
        self._kept = {u: k for u, k in self._kept.items() if now - k.asked_s < KEPT_S}
        try:
            given = await self._link.bus.request(
                secrets(self._node), SecretsWanted(uid=uid, project=project), SecretsGiven,
                timeout_s=ASK_S,
            )  # fmt: skip
        except Unavailable:
            if (kept := self._kept.get(uid)) is not None:
                return kept.values
            raise
        except BaseException:
            self._kept.pop(uid, None)
            raise
        self._kept[uid] = _Kept(given.secrets, now)
        return given.secrets
