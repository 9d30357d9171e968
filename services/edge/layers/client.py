"""The edge's side of the layer service.

Owns: questions to it, repeated over its restarts, and the descriptor of its folder. Does
not own: mounting. Thread-safe; calls block for at most their deadline.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from services.edge.drivers.base import Layer
from services.edge.layers.control import Answer, Question, Trace, ask
from services.edge.layers.faults import Fault
from shared.errors import DsecError, Unavailable, from_code

PREPARE_S = 40.0
"""Longer than the service's own deadline, so that its words are heard."""
QUESTION_S = 5.0
AGAIN_S = 0.05


class LayerService:
    """The service whose folder is ``root``."""

    def __init__(self, root: Path, *, prepare_s: float = PREPARE_S) -> None:
        self._root, self._prepare_s = root, prepare_s
        self._lock = threading.Lock()
        self._connection, self._folder = "", -1

    def prepare(self, digests: Sequence[str]) -> list[Layer]:
        """The layers, mountable. Raises ``NotFound``, ``Unavailable`` or
        ``DeadlineExceeded`` with cause ``image``."""
        deadline = time.monotonic() + self._prepare_s
        question = Question(ask="prepare", digests=list(digests))
        answer = self._ask(question, deadline)
        folder = self._folder_of(answer.connection, deadline)
        return [
            Layer(
                place.digest, place.meta,
                f"/proc/self/fd/{folder}/{place.digest}" if place.has_data else None,
                answer.connection,
            )
            for place in answer.places
        ]  # fmt: skip

    def faults(self, after: int) -> list[Fault]:
        """What went wrong since fault number ``after``."""
        deadline = time.monotonic() + QUESTION_S
        return self._ask(Question(ask="faults", after=after), deadline).faults

    def traces(self, after: int) -> list[Trace]:
        """What of layers was read, since trace number ``after``."""
        deadline = time.monotonic() + QUESTION_S
        return self._ask(Question(ask="traces", after=after), deadline).traces

    def stats(self) -> dict[str, int]:
        """Counters, for measuring."""
        return self._ask(Question(ask="stats"), time.monotonic() + QUESTION_S).stats

    def fetched_bytes(self, digests: Sequence[str]) -> int:
        """What the service has fetched of the layers' data since it began."""
        question = Question(ask="fetched", digests=list(digests))
        return sum(self._ask(question, time.monotonic() + QUESTION_S).stats.values())

    def close(self) -> None:
        with self._lock:
            if self._folder >= 0:
                os.close(self._folder)
            self._connection, self._folder = "", -1

    def _folder_of(self, connection: str, deadline: float) -> int:
        """The descriptor of the service's folder; another after its connection changed."""
        with self._lock:
            if connection != self._connection:
                answer, fds = self._asked(Question(ask="mount"), deadline)
                if self._folder >= 0:
                    os.close(self._folder)
                self._connection, self._folder = answer.connection, fds[0]
            return self._folder

    def _ask(self, question: Question, deadline: float) -> Answer:
        answer, _ = self._asked(question, deadline)
        if answer.error is not None:
            raise _error(*answer.error)
        return answer

    def _asked(self, question: Question, deadline: float) -> tuple[Answer, list[int]]:
        while True:
            left = deadline - time.monotonic()
            try:
                return ask(self._root, question, timeout_s=max(left, 0.001))
            except OSError as error:  # it is being started again
                if time.monotonic() + AGAIN_S > deadline:
                    raise Unavailable(
                        f"the layer service does not answer: {error}", cause="image"
                    ) from error
                time.sleep(AGAIN_S)


def _error(code: str, message: str) -> DsecError:
    return from_code(code, message, cause="image", is_infra=True)
