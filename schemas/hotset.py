"""Messages about what of layers is read, and which serve most sandboxes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas.base import Message, Seconds, Versioned

UNITS_MAX = 4096
"""Units of one layer in one trace: 2 GiB of the default size."""
DAY_S = 86_400.0


class LayerAccess(Message, frozen=True):
    """What the first reader of a layer on a node needed: numbers of units of
    ``unit_bytes`` of its data."""

    digest: str
    unit_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)]
    units: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 53)]], Meta(max_length=UNITS_MAX)]


class LayerAccesses(Versioned, frozen=True):
    """edge → imagesvc, ``dsec.evt.v1.edge.access_profile.<node>``."""

    node: str
    layers: Annotated[list[LayerAccess], Meta(max_length=256)]


class EnvironmentsQuery(Versioned, frozen=True):
    """imagesvc → scheduler, ``dsec.rpc.v1.scheduler.environments``: what was started in the
    last ``since_s`` seconds, the most frequent first."""

    since_s: Seconds
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000


class EnvironmentCount(Message, frozen=True):
    """``digests`` bottom first, and how many sandboxes were started from them."""

    digests: list[str]
    sandboxes: int


class EnvironmentCounts(Versioned, frozen=True):
    """As much as a scheduler remembers: it forgets sandboxes that ended long ago."""

    environments: list[EnvironmentCount]


class HotSetQuery(Versioned, frozen=True):
    """``get image.hot_set``: the smallest set of layers that serves ``share`` of the
    sandboxes started in the last ``since_s`` seconds, in all projects."""

    share: Annotated[float, Meta(ge=0, le=1)] = 0.8
    since_s: Seconds = 7 * DAY_S


class HotLayer(Message, frozen=True):
    """A layer of the set. ``hot_bytes`` is what its readers needed, metadata included:
    ``units`` of ``unit_bytes``; all of it where nothing was traced (no ``unit_bytes``)."""

    digest: str
    size_bytes: int
    hot_bytes: int
    unit_bytes: int | None = None
    units: list[int] = []


class HotSet(Versioned, frozen=True):
    """``share`` is what is served: less than was asked for where layers are gone. Layers
    are in the order in which they are worth fetching."""

    share: float
    sandboxes: int
    size_bytes: int
    hot_bytes: int
    layers: list[HotLayer]
