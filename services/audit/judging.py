"""New violations become findings, in the transaction that records them.

Owns: loading and storing what rules have measured, findings' rows, and what goes out for
them. Does not own: rules, responses, the chain. Because instances take turns in that
transaction, the windows of rules are right with any number of them, and a message that
comes again counts once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.audit import Finding
from schemas.base import encode
from schemas.subjects import audit as finding_subject
from services.audit import records, responses
from services.audit.engine import Engine, Key, Window
from services.audit.events import event
from services.audit.records import Row
from services.audit.responses import Choice
from services.audit.store import After
from shared.bus import Outgoing
from shared.db import fetch
from shared.outbox import Outbox

log = logging.getLogger(__name__)

_LOAD = text(
    "select rule, key, state from measured join unnest(cast(:rules as text[]),"
    " cast(:keys as text[])) as t(rule, key) using (rule, key)"
)
_SAVE = text(
    "insert into measured (rule, key, state) select * from unnest(cast(:rules as text[]),"
    " cast(:keys as text[]), cast(:states as bytea[])) "
    "on conflict (rule, key) do update set state = excluded.state, at = now()"
)
_PRUNE = text(
    "delete from measured where (rule, key) in (select rule, key from measured "
    "where at < now() - make_interval(secs => :keep) limit :n for update skip locked) "
    "returning rule"
)

_state = msgspec.json.Decoder(Window)


class Judge:
    """Applies rules to rows as they are recorded."""

    def __init__(self, engine: Engine, choices: Sequence[Choice], outbox: Outbox) -> None:
        self._engine = engine
        self._choices = choices
        self._outbox = outbox
        self.findings = 0
        """Findings since the start."""

    async def __call__(
        self, connection: AsyncConnection, rows: Sequence[Row]
    ) -> tuple[list[Row], After]:
        """Rows of findings about ``rows``, and what is to follow the commit."""
        taken = self._engine.take(event(row.record_id, row.record) for row in rows)
        windows = await _load(connection, {item.key for item in taken})
        found = self._engine.fold(taken, windows)
        await _save(connection, windows)
        told, out = self._answer(found)
        sent = await self._outbox.add(connection, out)

        def after() -> None:
            self.findings += len(told)
            self._outbox.sent_by_me(sent)
            for finding in told:
                log.info("finding %s of %s: %s", finding.rule, finding.uid, finding.explanation)

        return [records.from_finding(finding) for finding in told], after

    def _answer(self, found: Sequence[Finding]) -> tuple[list[Finding], list[Outgoing]]:
        told, out = [], []
        for item in found:
            finding, requests = responses.decide(item, self._choices)
            told.append(finding)
            subject = finding_subject(finding.project, finding.severity, finding.rule)
            out.append(Outgoing(subject, encode(finding)))
            out += requests
        return told, out


async def prune(connection: AsyncConnection, *, keep_s: float, limit: int) -> int:
    """Removes windows that nothing was added to for so long; returns how many."""
    return len(await fetch(connection, _PRUNE, {"keep": keep_s, "n": limit}))


async def _load(connection: AsyncConnection, keys: set[Key]) -> dict[Key, Window]:
    if not keys:
        return {}
    ordered = sorted(keys)
    parameters = {"rules": [rule for rule, _ in ordered], "keys": [key for _, key in ordered]}
    rows = await fetch(connection, _LOAD, parameters)
    return {(row["rule"], row["key"]): _state.decode(row["state"]) for row in rows}


async def _save(connection: AsyncConnection, windows: dict[Key, Window]) -> None:
    if not windows:
        return
    ordered = sorted(windows.items())
    await fetch(
        connection,
        _SAVE,
        {
            "rules": [rule for (rule, _), _ in ordered],
            "keys": [key for (_, key), _ in ordered],
            "states": [msgspec.json.encode(window) for _, window in ordered],
        },
    )
