"""Giving back what is over before a quota refuses: the event of an end may still be on
its way when the client that was told of it asks for the next sandbox.

Owns: asking the scheduler what has ended. Does not own: the usual way
(:mod:`services.auth.releases`), charges that no event ever releases
(:mod:`services.auth.reconcile`).
"""

from __future__ import annotations

import logging

from schemas.sandbox import Ended, EndedQuery
from schemas.subjects import rpc
from services.auth.releases import release
from shared.bus import Bus
from shared.db import Database
from shared.errors import DsecError

log = logging.getLogger(__name__)

SINCE_S = 60.0
"""Of ends longer ago auth has heard, or :mod:`services.auth.reconcile` finds them."""
ANSWER_S = 2.0
"""A scheduler that does not answer releases nothing: the refusal stands."""


async def release_ended(db: Database, bus: Bus) -> int:
    """Releases what ended lately; returns how many sandboxes were still charged."""
    query = EndedQuery(since_s=SINCE_S)
    try:
        ended = await bus.request(rpc("scheduler", "ended"), query, Ended, timeout_s=ANSWER_S)
    except DsecError as err:
        log.info("what is over is not known: %s", err.message)
        return 0
    return await release(db, ended.sandboxes) if ended.sandboxes else 0
