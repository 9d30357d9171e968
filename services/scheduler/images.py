"""Image names to layers, asked of imagesvc: batched, cached for a moment.

Owns: the question and a cache of its answers. imagesvc tells when a name means
something else; ``CACHE_S`` bounds how long a lost word counts. Does not own: images.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from schemas.base import WireError, encode
from schemas.image import ImageChanged, Resolved, ResolveItem, ResolveReply, ResolveRequest
from schemas.sandbox import ResolvedSpec, SandboxSpec
from schemas.subjects import rpc
from services.scheduler.sending import SpecKey
from shared.bus import Bus, Incoming
from shared.errors import DsecError

CACHE_S = 10.0
MAX_CACHED = 4096
MAX_ITEMS = 2048
"""Environments in one question."""

Key = tuple[tuple[str, ...], tuple[str, ...]]
Wanted = Mapping[SpecKey, tuple[SandboxSpec, list[str]]]
Answer = tuple[bytes | None, WireError | None]
"""An encoded ``ResolvedSpec``, or why not; neither while imagesvc is away."""


class Images:
    """Resolves specs. A spec without image needs no answer."""

    def __init__(self, bus: Bus, timeout_s: float) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._cache: dict[Key, tuple[float, Resolved]] = {}
        self._changes = 0

    async def changed(self, message: ImageChanged, _incoming: Incoming) -> None:
        """Forgets what was known of a name, with whatever tag and from whatever project."""
        self._changes += 1
        base = message.name.partition(":")[0]
        self._cache = {
            key: found
            for key, found in self._cache.items()
            if all(name.partition(":")[0] != base for name in key[0])
        }

    async def resolve(self, wanted: Wanted) -> dict[SpecKey, Answer]:
        """One answer per spec; never raises for an imagesvc that is away."""
        keys = {k: _key(spec, projects) for k, (spec, projects) in wanted.items()}
        now = time.monotonic()
        if len(self._cache) > MAX_CACHED:
            self._cache.clear()
        unknown = [k for k in dict.fromkeys(keys.values()) if k[0] and not self._fresh(k, now)]
        known = {k: self._cache[k][1] for k in keys.values() if k[0] and k not in set(unknown)}
        for i in range(0, len(unknown), MAX_ITEMS):
            known |= await self._ask(unknown[i : i + MAX_ITEMS])
        return {k: _answer(wanted[k][0], key, known.get(key)) for k, key in keys.items()}

    def _fresh(self, key: Key, now: float) -> bool:
        found = self._cache.get(key)
        return found is not None and now - found[0] < CACHE_S

    async def _ask(self, keys: list[Key]) -> dict[Key, Resolved]:
        items = [ResolveItem(names=list(n), projects=list(p)) for n, p in keys]
        changes = self._changes
        try:
            reply = await self._bus.request(
                rpc("imagesvc", "resolve"), ResolveRequest(items=items), ResolveReply,
                timeout_s=self._timeout_s,
            )  # fmt: skip
        except DsecError:
            return {}
        now = time.monotonic()
        found = dict(zip(keys, reply.items, strict=False))
        if changes == self._changes:  # else this answer may be from before the change
            self._cache |= {k: (now, r) for k, r in found.items() if r.error is None}
        return found


def _key(spec: SandboxSpec, projects: list[str]) -> Key:
    names = spec.layers or ([spec.container_image] if spec.container_image else [])
    return tuple(names), tuple(projects)


def _answer(spec: SandboxSpec, key: Key, found: Resolved | None) -> Answer:
    if not key[0]:
        return encode(ResolvedSpec(spec=spec)), None
    if found is None or (found.error is not None and found.error.retryable):
        return None, None
    if found.error is not None:
        return None, _image_error(found.error)
    return encode(ResolvedSpec(spec=spec, layers=found.layers, image=found.config)), None


def _image_error(error: WireError) -> WireError:
    return WireError(
        code=error.code, message=error.message, field=error.field or "container_image",
        retryable=error.retryable, cause=error.cause or "image", is_infra=error.is_infra,
        retry_after_s=error.retry_after_s, details=error.details,
    )  # fmt: skip
