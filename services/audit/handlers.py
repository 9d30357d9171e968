"""What audit does with messages: batches into the record, judged on the way."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from schemas.audit import AuditReport, Violations
from schemas.base import ErrorReply, Ok, decode, encode
from services.audit.correlation import Correlation
from services.audit.judging import Judge
from services.audit.records import Row, from_accesses, from_report, from_violation
from services.audit.store import Store
from shared.bus import Bus, Outgoing
from shared.clock import Clock
from shared.consumer import Received
from shared.errors import DsecError, NotFound, Unavailable
from shared.wire import to_wire

log = logging.getLogger(__name__)


class Handlers:
    """Repeated messages are harmless: a record's id is written once."""

    def __init__(
        self, store: Store, *, judge: Judge, correlation: Correlation, bus: Bus, clock: Clock,
        root: str,
    ) -> None:  # fmt: skip
        self._store = store
        self._judge = judge
        self._correlation = correlation
        self._bus = bus
        self._clock = clock
        self._root = root

    async def access(self, batch: Sequence[Received]) -> None:
        """``dsec.evt.v1.*.access.*``: every verb, once."""
        rows = [row for item in batch for row in from_accesses(item.subject, item.data)]
        await self._store.append(rows)

    async def violations(self, batch: Sequence[Received]) -> None:
        """``dsec.sec.v1.>``: what sandboxes were denied, or did too much of."""
        told = [
            (item.subject.rpartition(".")[2], violation)
            for item in batch
            for violation in decode(item.data, Violations).violations
        ]
        owners = await self._correlation.owners({(v.uid, node) for node, v in told if v.uid})
        now = self._clock.now()
        rows = [from_violation(node, v, owners, root=self._root, now=now) for node, v in told]
        await self._store.append(rows, self._judge)

    async def reports(self, batch: Sequence[Received]) -> None:
        """``dsec.cmd.v1.audit.report.*``: what graders saw, of their own projects only."""
        told = [decode(item.data, AuditReport) for item in batch]
        owners = await self._correlation.owners({(r.report.uid, "") for r in told})
        rows: list[Row] = []
        answers: list[DsecError | None] = []
        for report in told:
            owner = owners.get(report.report.uid)
            if owner is None or owner.project != report.project:
                # the same text whether it is another's or nobody's
                answers.append(NotFound(f"no sandbox {report.report.uid}", field="uid"))
                continue
            rows += from_report(report, owner)
            answers.append(None)
        await self._store.append(rows, self._judge)
        for item, report, error in zip(batch, told, answers, strict=True):
            await self._answer(item, report, error)

    async def _answer(self, item: Received, report: AuditReport, error: DsecError | None) -> None:
        if item.reply_to is None:
            return
        reply = (
            Ok()
            if error is None
            else ErrorReply(error=to_wire(error), request_id=report.report.request_id)
        )
        try:
            await self._bus.send(Outgoing(item.reply_to, encode(reply)))
        except Unavailable as exc:  # the client asks again; what is recorded stays so
            log.debug("an answer was not sent: %s", exc.message)
