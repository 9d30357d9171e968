"""The worker's program: ``python3 -m libdsec.rollout.worker`` in a worker container.

Owns: loading the user's loop, the diary of the run. Does not own: what a loop does
(:mod:`libdsec.rollout._loop`).

The key comes in a file that only its user may read, named by ``DSEC_CONFIG``. A worker
that was killed and is started again goes on: rollouts that had ended have ended, the
others begin again with the sandboxes they had.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from libdsec._portal import portal
from libdsec.client import DSecClient
from libdsec.errors import Unavailable
from libdsec.rollout._loop import Loop, run_all
from libdsec.rollout._messages import DIARY, LOOP, PID, PLAN, Event, Kind, Plan

OPEN_S = 10.0
OPEN_TRIES = 30
AGAIN_S = 1.0


class Diary:
    """The events of the run, in a file that is only appended to."""

    def __init__(self, path: Path) -> None:
        self.finished: set[int] = set()
        self.over = False
        whole = path.read_bytes() if path.exists() else b""
        lines = whole.splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n")]
        for line in kept:
            self._note(msgspec.json.decode(line, type=Event))
        self._seq = len(kept)
        self._file = path.open("r+b" if path.exists() else "x+b")
        self._file.truncate(sum(map(len, kept)))  # half a line of one that was killed
        self._file.seek(0, os.SEEK_END)

    def _note(self, event: Event) -> None:
        if event.kind in ("result", "failed"):
            self.finished.add(event.rollout)
        self.over = self.over or event.kind == "over"

    def tell(self, kind: Kind, rollout: int, data: Any, is_infra: bool) -> None:
        """One more event: it is in the file before anything else happens."""
        event = Event(self._seq, time.time(), kind, rollout, data, is_infra)
        self._file.write(msgspec.json.encode(event) + b"\n")
        self._file.flush()
        self._seq += 1
        self._note(event)


def load(name: str) -> Loop:
    """The function ``name`` of the file ``LOOP``."""
    spec = importlib.util.spec_from_file_location("dsec_loop", LOOP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dsec_loop"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


async def run() -> None:
    """The whole run, or what is left of it."""
    plan = msgspec.json.decode(Path(PLAN).read_bytes(), type=Plan)
    diary = Diary(Path(DIARY))
    if diary.over:
        return
    loop = load(plan.loop)
    client = DSecClient(open_timeout=OPEN_S, keep=True)
    await _opened(client)
    try:
        await run_all(
            client, plan.run_id, loop, prompts=plan.prompts, group_size=plan.group_size,
            at_once=plan.at_once, tell=diary.tell, finished=diary.finished, routes=plan.routes,
        )  # fmt: skip
    finally:
        await client.close()


async def _opened(client: DSecClient) -> None:
    for left in reversed(range(OPEN_TRIES)):
        try:
            await client.open()
            return
        except Unavailable:
            if not left:
                raise
            await asyncio.sleep(AGAIN_S)


def main() -> None:
    """The run, unless another process of this container has it."""
    logging.basicConfig(level=logging.INFO)
    with Path(PID).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        portal().call(run())  # loops may be plain functions


if __name__ == "__main__":
    main()
