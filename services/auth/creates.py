"""From a create request to the scheduler's command. Pure.

Owns: judging specs, grouping equal ones, cutting commands into pieces that fit the
bus. Does not own: quotas (:mod:`services.auth.admission`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from schemas.base import WireError, decode, encode
from schemas.sandbox import MAX_BATCH, CreateCommand, CreateItem, CreateRequest, SandboxSpec
from services.auth.validate import judge
from shared import ids
from shared.errors import InvalidRequest

PIECE_ITEMS = 1024
PIECE_BYTES = 512 * 1024
"""Bounds of one piece of a command. Pieces of one request share its id and total."""


class Refusal(msgspec.Struct, array_like=True):
    """Items ``start`` to ``stop`` of a request, refused by a quota."""

    start: int
    stop: int
    error: WireError


@dataclass(slots=True)
class Create:
    """A create request, judged. ``spec_of[i]`` is the index of item *i*'s spec in
    ``specs``, or -1 where ``refused[i]`` says why not. ``projects``: its project and
    the ancestors, nearest first."""

    project: str
    principal: str
    request: CreateRequest
    digest: bytes
    specs: list[SandboxSpec] = field(default_factory=list)
    spec_of: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    refused: dict[int, WireError] = field(default_factory=dict)
    projects: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.spec_of)

    def uid(self, index: int) -> str:
        """The uid of item ``index``."""
        return ids.item_uid(self.request.request_id, index)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """``(start, stop, spec)`` of neighbours with equal specs that are not refused."""
        start, total = 0, self.total
        while start < total:
            spec, stop = self.spec_of[start], start + 1
            while stop < total and self.spec_of[stop] == spec:
                stop += 1
            if spec >= 0:
                yield start, stop, spec
            start = stop

    def replace(self, spec: int, by: SandboxSpec) -> None:
        """Puts what a spec means in its place."""
        self.specs[spec], self.sizes[spec] = by, len(encode(by))

    def deny(self, spec: int, error: WireError) -> None:
        """Marks the items of one spec."""
        for index, its in enumerate(self.spec_of):
            if its == spec:
                self.refused[index] = error
                self.spec_of[index] = -1

    def refuse(self, refusals: Sequence[Refusal]) -> None:
        """Marks what a quota refused."""
        for refusal in refusals:
            for index in range(refusal.start, refusal.stop):
                self.refused[index] = refusal.error
                self.spec_of[index] = -1


def read(project: str, principal: str, body: bytes, *, fork: bool = False) -> Create:
    """The judged request in ``body``. Raises ``BadMessage`` or ``InvalidRequest``
    where the request as a whole is no request."""
    request = decode(body, CreateRequest)
    if fork and len(request.specs) != 1:
        raise InvalidRequest("a fork has exactly one spec", field="specs")
    if request.count > 1 and len(request.specs) > 1:
        raise InvalidRequest("count goes with exactly one spec", field="count")
    create = Create(project, principal, request, _digest(request))
    seen: dict[bytes, int] = {}
    for index, part in enumerate(request.specs):
        raw = bytes(part)
        known = seen.get(raw)
        if known is None:
            judged = judge(raw, fork=fork)
            if isinstance(judged, WireError):
                create.spec_of.append(-1)
                create.refused[index] = judged
                continue
            known = seen[raw] = len(create.specs)
            create.specs.append(judged)
            create.sizes.append(len(raw))
        create.spec_of.append(known)
    if request.count > 1:
        _multiply(create, request.count)
    return create


def _multiply(create: Create, count: int) -> None:
    assert count <= MAX_BATCH
    create.spec_of *= count
    if create.refused:
        create.refused = dict.fromkeys(range(count), create.refused[0])


def _digest(request: CreateRequest) -> bytes:
    """The request's content, without how long its sender would wait."""
    content = hashlib.sha256(f"{request.count}".encode())
    for part in request.specs:
        content.update(b"\0")
        content.update(bytes(part))
    return content.digest()


def pieces(
    create: Create, *, expires_at: float, reply_to: str | None, trace: str | None,
    asked_at: float,
) -> Iterator[CreateCommand]:  # fmt: skip
    """The scheduler's commands: at most ``PIECE_ITEMS`` items and about
    ``PIECE_BYTES`` of specs each."""
    start = 0
    while start < create.total:
        specs: dict[int, int] = {}
        items: list[CreateItem] = []
        size = 0
        for index in range(start, create.total):
            spec = create.spec_of[index]
            extra = create.sizes[spec] if spec >= 0 and spec not in specs else 0
            if items and (len(items) == PIECE_ITEMS or size + extra > PIECE_BYTES):
                break
            size += extra
            place = specs.setdefault(spec, len(specs)) if spec >= 0 else -1
            items.append(
                CreateItem(
                    uid=create.uid(index), index=index, spec=place,
                    refused=create.refused.get(index),
                )
            )  # fmt: skip
        start += len(items)
        yield CreateCommand(
            project=create.project, principal=create.principal,
            request_id=create.request.request_id, total=create.total,
            specs=[create.specs[s] for s in specs], items=items,
            expires_at=expires_at, reply_to=reply_to, trace=trace,
            projects=create.projects, asked_at=asked_at,
        )  # fmt: skip
