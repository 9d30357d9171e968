"""What trainer and worker leave each other, as JSON: the plan, the diary.

Owns: their form and places in the worker container. Does not own: writing or reading
them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from libdsec import counting

HOME = "/var/lib/dsec-rollout"
PLAN = f"{HOME}/plan.json"
LOOP = f"{HOME}/loop.py"
CREDENTIALS = f"{HOME}/credentials.toml"
"""Mode 0600; the worker's own key and nobody else's."""
DIARY = f"{HOME}/diary.jsonl"
"""One :class:`Event` a line; only ever appended to."""
LOG = f"{HOME}/worker.log"
PID = f"{HOME}/pid"

Kind = Literal["begun", "told", "result", "failed", "over"]


class Plan(msgspec.Struct, frozen=True):
    """What a worker is to do. ``loop`` names a function of the file ``LOOP``.
    ``routes``: name → port of the worker's loopback interface."""

    run_id: str
    loop: str
    prompts: list[Any]
    group_size: int
    at_once: int
    routes: dict[str, int]


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened in a run. ``seq`` counts from 0 without gaps; ``at`` is
    the worker's clock. ``kind``: a rollout was ``begun``, ``told`` something
    (:meth:`Rollout.tell`), came to a ``result`` or ``failed``; the run is ``over``.
    ``rollout`` is its index, -1 for the run; ``data``, what was told or the value."""

    seq: int
    at: float
    kind: Kind
    rollout: int = -1
    data: Any = None
    is_infra: bool = False


class Result(msgspec.Struct, frozen=True):
    """How one rollout ended: the loop's ``value``, or an ``error``. ``is_infra``: the
    infrastructure failed it, so it says nothing about the policy."""

    index: int
    prompt: int
    sample: int
    value: Any = None
    error: str | None = None
    is_infra: bool = False


def noted(result: Result) -> Result:
    """The same, counted where it says nothing about the policy."""
    if result.is_infra:
        counting.count("masked", "rollout")
    return result


def result_of(event: Event, group_size: int) -> Result | None:
    """The result that an event tells, if it tells one."""
    if event.kind not in ("result", "failed"):
        return None
    prompt, sample = divmod(event.rollout, group_size)
    failed = event.kind == "failed"
    return Result(
        event.rollout, prompt, sample, None if failed else event.data,
        str(event.data) if failed else None, event.is_infra,
    )  # fmt: skip
