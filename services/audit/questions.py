"""What audit answers: pages of the record, rules, trials of rules, the chain, suggestions.

Owns: bounds of each question. Does not own: who may ask (auth says which projects may be
seen: a question about none is refused, not answered with everything).
"""

from __future__ import annotations

import asyncio
from typing import Any

from schemas.audit import (
    AuditPage,
    AuditQuery,
    DryRunQuery,
    DryRunReply,
    Finding,
    RulesQuery,
    RulesReply,
    SuggestQuery,
    SuggestReply,
    VerifyQuery,
    VerifyReply,
)
from schemas.subjects import rpc
from services.audit import rulebook, suggesting
from services.audit.engine import Engine, Key, Window
from services.audit.events import Event, event
from services.audit.store import Store
from services.audit.verify import Verdict, verify
from shared.bus import Bus, Incoming
from shared.errors import InvalidRequest

VERIFY_AT_ONCE = 20_000
"""Entries of one answer: about a second of work."""
FINDINGS_AT_ONCE = 500
TRIED_AT_ONCE = 50
"""Rules of one trial."""


class Questions:
    """Answers ``dsec.rpc.v1.audit.*``."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._engine = engine

    def answer_on(self, bus: Bus, queue: str) -> None:
        """Subscribes; before the bus is started."""
        for verb, type_, answer in (
            ("list", AuditQuery, self.entries), ("rules", RulesQuery, self.rules),
            ("dry_run", DryRunQuery, self.dry_run), ("verify", VerifyQuery, self.verify),
            ("suggest", SuggestQuery, self.suggest),
        ):  # fmt: skip
            bus.answer(rpc("audit", verb), type_, answer, queue=queue)

    async def entries(self, query: AuditQuery, _: Incoming) -> AuditPage:
        """``list``."""
        _scoped(query)
        return await self._store.page(query)

    async def rules(self, query: RulesQuery, _: Incoming) -> RulesReply:
        """``rules``: those in force."""
        known = self._engine.rules
        chosen = [known[query.rule]] if query.rule in known else []
        return RulesReply(rules=[r.info() for r in (chosen if query.rule else known.values())])

    async def dry_run(self, query: DryRunQuery, _: Incoming) -> DryRunReply:
        """``dry_run``: the same engine over events of the record, with windows that begin
        empty."""
        _scoped(query)
        engine = Engine(rulebook.collect({"rules": query.rules}))
        if len(engine.rules) > TRIED_AT_ONCE:
            raise InvalidRequest(f"at most {TRIED_AT_ONCE} rules at once", field="rules")
        events = await self._events(query, query.limit + 1)
        # in a thread: the record must go on while somebody tries slow rules
        findings = await asyncio.to_thread(_tried, engine, events[-query.limit :])
        return DryRunReply(
            events=min(len(events), query.limit), findings=findings[:FINDINGS_AT_ONCE],
            complete=len(events) <= query.limit and len(findings) <= FINDINGS_AT_ONCE,
        )  # fmt: skip

    async def suggest(self, query: SuggestQuery, _: Incoming) -> SuggestReply:
        """``suggest``."""
        _scoped(query)
        events = await self._events(query, query.limit)
        for name in ("job", "task"):
            if (wanted := getattr(query, name)) is not None:
                events = [e for e in events if getattr(e, name) == wanted]
        withheld = suggesting.withheld(events, self._engine.rules.values())
        return SuggestReply(events=len(events), suggestions=suggesting.suggest(events, withheld))

    async def verify(self, query: VerifyQuery, _: Incoming) -> VerifyReply:
        """``verify``: a part of the chain, and where the next one begins."""
        head, anchor = await self._store.head(), await self._store.anchor()
        seq, previous = anchor.seq, anchor.hash
        if query.after is not None and query.after > anchor.seq:
            seq, previous = query.after, _hash(query.hash)
        verdict = await verify(
            self._store.entries(seq, most=VERIFY_AT_ONCE), head, seq=seq, previous=previous,
            most=VERIFY_AT_ONCE,
        )  # fmt: skip
        return _reply(verdict, head.seq, anchor.seq)

    async def _events(self, query: Any, limit: int) -> list[Event]:
        wanted = AuditQuery(
            project=query.project, projects=query.projects, since=query.since,
            until=getattr(query, "until", None), target=getattr(query, "uid", None),
        )  # fmt: skip
        return [event(id_, r) for id_, r in await self._store.violations(wanted, limit)]


def _tried(engine: Engine, events: list[Event]) -> list[Finding]:
    windows: dict[Key, Window] = {}
    return engine.fold(engine.take(events), windows)


def _reply(verdict: Verdict, head: int, anchor: int) -> VerifyReply:
    return VerifyReply(
        seq=verdict.seq, hash=verdict.hash.hex(), head=head, anchor=anchor,
        broken_at=verdict.broken_at, reason=verdict.reason,
    )  # fmt: skip


def _scoped(query: Any) -> None:
    if not query.projects and query.project is None:
        raise InvalidRequest("an audit query must name its projects", field="projects")


def _hash(text: str | None) -> bytes:
    try:
        found = bytes.fromhex(text or "")
    except ValueError:
        found = b""
    if len(found) != 32:
        raise InvalidRequest("the hash of the entry it begins behind, in hex", field="hash")
    return found
