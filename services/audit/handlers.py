"""What audit does with messages: batches into the record, queries out of it."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.audit import AccessRecords, AuditPage, AuditQuery, Violations
from schemas.base import decode
from services.audit.records import Row, from_access, from_violation, reporter
from services.audit.store import Store
from shared.bus import Incoming
from shared.consumer import Received
from shared.errors import InvalidRequest


class Handlers:
    """Repeated messages are harmless: a record's id is written once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def access(self, batch: Sequence[Received]) -> None:
        """``dsec.evt.v1.*.access.*``: every verb, once."""
        rows: list[Row] = []
        for item in batch:
            source, node = reporter(item.subject)
            records = decode(item.data, AccessRecords).records
            rows += (from_access(source, record, node=node) for record in records)
        await self._store.append(rows)

    async def violations(self, batch: Sequence[Received]) -> None:
        """``dsec.sec.v1.>``: what sandboxes were denied."""
        rows: list[Row] = []
        for item in batch:
            node = item.subject.rpartition(".")[2]
            violations = decode(item.data, Violations).violations
            rows += (from_violation(node, violation) for violation in violations)
        await self._store.append(rows)

    async def entries(self, query: AuditQuery, _: Incoming) -> AuditPage:
        """Answers ``audit.entries``. The asker says which projects may be seen: an
        unbounded query is refused, not answered with everything."""
        if not query.projects and query.project is None:
            raise InvalidRequest("an audit query must name its projects", field="projects")
        return await self._store.page(query)
