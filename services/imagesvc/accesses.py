"""What of layers is read, and the hot set made of it.

Owns: traces as edges tell them, joined per layer, told to the store as what is read first;
the question for the hot set. Does not own: the choice (``hotset``), what was started how
often (the scheduler).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import chain, islice

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import decode
from schemas.hotset import (
    EnvironmentCounts,
    EnvironmentsQuery,
    HotLayer,
    HotSet,
    HotSetQuery,
    LayerAccess,
    LayerAccesses,
)
from schemas.subjects import rpc
from services.imagesvc.hotset import Environment, choose
from shared.blobs.base import BlobStore
from shared.blobs.layout import DATA_CHUNK_BYTES, FIRST_MAX
from shared.bus import Bus, Incoming
from shared.consumer import Received
from shared.db import Database
from shared.errors import DsecError

log = logging.getLogger(__name__)

ASK_S = 4.0
"""Less than auth waits for us."""

_MERGE = text(
    "insert into layer_access (digest, unit_bytes, units) "
    "select d, :unit, cast(:units as bigint[]) from (select cast(:digest as text) as d) t "
    "where exists (select from layer where layer.digest = d) "
    "on conflict (digest) do update set seen_at = now(), unit_bytes = excluded.unit_bytes, "
    "units = case when layer_access.unit_bytes <> excluded.unit_bytes then excluded.units else "
    "array(select distinct u from unnest(layer_access.units || excluded.units) u order by u) end"
)
_FACTS = text(
    "select l.digest, l.size_bytes, a.unit_bytes, a.units from layer l "
    "left join layer_access a using (digest) where l.digest = any(cast(:d as text[]))"
)

_KEPT = text(
    "select digest from layer where digest = any(cast(:d as text[])) order by digest for key share"
)
"""Locked, so that the collector leaves their files alone meanwhile."""


async def merge(connection: AsyncConnection, access: LayerAccess) -> None:
    """Adds a trace to what is known of its layer; one of a layer that is gone is nothing."""
    await connection.execute(
        _MERGE,
        {"digest": access.digest, "unit": access.unit_bytes, "units": sorted(set(access.units))},
    )


def chunks_of(access: LayerAccess) -> list[int]:
    """What was read, in chunks of the store; the first ``FIRST_MAX``."""
    size = access.unit_bytes
    spans = (
        range(unit * size // DATA_CHUNK_BYTES, -(-(unit + 1) * size // DATA_CHUNK_BYTES))
        for unit in access.units
    )
    return list(dict.fromkeys(islice(chain.from_iterable(spans), FIRST_MAX)))


class Accesses:
    """The handlers of traces and of ``hot_set``."""

    def __init__(self, bus: Bus, db: Database, blobs: BlobStore) -> None:
        self._bus, self._db, self._blobs = bus, db, blobs

    async def record(self, batch: Sequence[Received]) -> None:
        """Traces of edges, in one transaction; told twice they are the same."""
        told = [decode(message.data, LayerAccesses) for message in batch]
        accesses = [one for message in told for one in message.layers]
        async with self._db.transaction() as connection:
            for access in sorted(accesses, key=lambda one: one.digest):
                await merge(connection, access)
        await self._hint({access.digest: chunks_of(access) for access in accesses})

    async def _hint(self, first: Mapping[str, Sequence[int]]) -> None:
        """What the first reader needed is fetched ahead by whichever node is next."""
        async with self._db.transaction() as connection:
            rows = await connection.execute(_KEPT, {"d": list(first)})
            for digest in [str(row[0]) for row in rows]:
                try:
                    await asyncio.to_thread(self._blobs.hint, digest, first[digest])
                except DsecError as error:  # it is a hint
                    log.warning("what layer %s is read is not noted: %s", digest, error.message)

    async def hot_set(self, query: HotSetQuery, _: Incoming) -> HotSet:
        """The layers that serve most sandboxes, and what of them is read."""
        counts = await self._bus.request(
            rpc("scheduler", "environments"), EnvironmentsQuery(since_s=query.since_s),
            EnvironmentCounts, timeout_s=ASK_S,
        )  # fmt: skip
        environments = [
            Environment(tuple(one.digests), one.sandboxes) for one in counts.environments
        ]
        digests = sorted({digest for one in environments for digest in one.layers})
        async with self._db.transaction() as connection:
            rows = await connection.execute(_FACTS, {"d": digests})
            layers = {str(row[0]): hot_layer(*row) for row in rows}
        costs = {digest: layer.hot_bytes for digest, layer in layers.items()}
        made = choose(environments, costs, query.share)
        chosen = [layers[digest] for digest in made.layers]
        return HotSet(
            share=made.share, sandboxes=made.sandboxes, layers=chosen,
            size_bytes=sum(layer.size_bytes for layer in chosen),
            hot_bytes=sum(layer.hot_bytes for layer in chosen),
        )  # fmt: skip


def hot_layer(
    digest: str, size_bytes: int, unit_bytes: int | None, units: Sequence[int] | None
) -> HotLayer:
    """A layer with what of it is read; all of it where that is not known."""
    if unit_bytes is None or units is None:
        return HotLayer(digest=digest, size_bytes=size_bytes, hot_bytes=size_bytes)
    hot = min(size_bytes, len(units) * unit_bytes)
    return HotLayer(
        digest=digest, size_bytes=size_bytes, hot_bytes=hot, unit_bytes=unit_bytes,
        units=list(units),
    )  # fmt: skip
