"""``dsec audit``: what the security team uses. All of it works with a key that holds
``audit.read`` and nothing else."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from libdsec import ocsf
from libdsec._ids import uid_of
from libdsec.cli.common import Aliases, Json, client, emit, of_column, run, table
from libdsec.errors import InvalidRequest, NotFound

app = typer.Typer(no_args_is_help=True, cls=Aliases)

QUERY_COLUMNS = (
    "seq", "at", "kind", "principal", "verb", "target", "outcome", "count", "id",
)  # fmt: skip
FINDING_COLUMNS = ("at", "severity", "rule", "uid", "job", "task", "principal", "explanation")
RULE_COLUMNS = ("id", "severity", "confidence", "measure", "threshold", "window_s", "respond",
                "title")  # fmt: skip
SUGGEST_COLUMNS = ("path", "value", "remove", "count", "sandboxes", "withheld", "reason")
EVIDENCE_COLUMNS = ("seq", "at", "source", "rule", "verdict", "count", "target")
KINDS = ("access", "violation", "finding", "retention")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Since = Annotated[
    str | None, typer.Option(help="Seconds since the epoch, or how long ago: 90s, 15m, 2h, 7d.")
]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1)]
Of = Annotated[str | None, typer.Option("--of", metavar="PROJECT", help="Default: ours.")]
Kind = Annotated[str | None, typer.Option(help="access, violation, finding or retention.")]
Text = Annotated[str | None, typer.Option()]


def moment(text: str | None, name: str) -> float | None:
    """Seconds since the epoch. Raises ``InvalidRequest``."""
    if text is None:
        return None
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return time.time() - float(ago[1]) * UNITS[ago[2]]
    try:
        return float(text)
    except ValueError:
        known = "seconds since the epoch, or how long ago: 90s, 15m, 2h, 7d"
        raise InvalidRequest(f"{text!r} is no time ({known})", field=name) from None


def _known(kind: str | None) -> str | None:
    """A kind of entries. Raises ``InvalidRequest``: of one that there is none of nothing is
    found, which looks like peace."""
    if kind not in (None, *KINDS):
        raise InvalidRequest(f"{kind!r} is none of {', '.join(KINDS)}", field="kind")
    return kind


def _line(entry: Any) -> dict[str, Any]:
    return {"seq": entry.seq, "kind": entry.kind, "id": entry.id, "hash": entry.hash,
            **entry.record}  # fmt: skip


def _row(entry: Any) -> dict[str, Any]:
    """An entry of any kind under the same columns."""
    record = entry.record
    names = {"violation": ("rule", "uid", "verdict"), "finding": ("rule", "uid", "severity")}
    verb, target, outcome = names.get(entry.kind, ("verb", "target", "outcome"))
    return {
        **_line(entry), "verb": record.get(verb), "target": record.get(target),
        "outcome": record.get(outcome),
    }  # fmt: skip


@app.command("query")
def query(
    kind: Kind = None,
    principal: Text = None,
    verb: Annotated[str | None, typer.Option(help="Or the rule.")] = None,
    target: Annotated[str | None, typer.Option(help="A sandbox, or what was named.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Or verdict, or severity.")] = None,
    since: Since = None,
    until: Since = None,
    limit: Limit = 50,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Shows the record, newest first."""

    async def work() -> None:
        async with client() as c:
            found = c.audit.list(
                project=of, kind=_known(kind), principal=principal, verb=verb, outcome=outcome,
                target=target and uid_of(target), since=moment(since, "since"),
                until=moment(until, "until"), limit=limit,
            )  # fmt: skip
            entries = [entry async for entry in found]
        if as_json:
            emit([_line(entry) for entry in entries])
        else:
            table([_row(entry) for entry in entries], QUERY_COLUMNS, as_json=False)

    run(work, as_json=as_json)


@app.command("tail")
def tail(
    since: Since = None,
    of: Of = None,
    count: Annotated[int | None, typer.Option(help="End after so many.")] = None,
    as_json: Json = False,
) -> None:
    """Follows findings as they are made, one a line."""

    async def work() -> None:
        left = count
        async with client() as c:
            async for finding in c.audit.findings(project=of, since=moment(since, "since")):
                _print_finding(msgspec.to_builtins(finding), as_json=as_json)
                left = None if left is None else left - 1
                if left == 0:
                    return

    run(work, as_json=as_json)


def _print_finding(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        line = json.dumps(facts, ensure_ascii=False)
    else:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["at"]))
        names = ("id", "uid", "job", "task", "principal")
        named = [f"{name}={facts[name]}" for name in names if facts.get(name)]
        line = "\t".join([at, facts["severity"], facts["rule"], *named, facts["explanation"]])
    print(line, flush=True)


@app.command("rules")
def rules(
    rule: Annotated[str | None, typer.Argument()] = None,
    dry_run: Annotated[
        Path | None, typer.Option(help="A rules file to try over what was recorded.")
    ] = None,
    since: Since = None,
    until: Since = None,
    limit: Annotated[int, typer.Option(help="Events to look at.", min=1)] = 20_000,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Lists the rules in force, or tries others over past events."""

    async def in_force() -> None:
        async with client() as c:
            found = [msgspec.to_builtins(r) for r in await c.audit.rules(rule)]
        if rule is not None and not found:
            raise NotFound(f"there is no rule {rule!r}", field="rule")
        table([{**_defaults(), **f} for f in found], RULE_COLUMNS, as_json=as_json)

    async def tried() -> None:
        assert dry_run is not None
        async with client() as c:
            reply = await c.audit.dry_run(
                _read(dry_run), project=of, since=moment(since, "since"),
                until=moment(until, "until"), limit=limit,
            )  # fmt: skip
        if as_json:
            emit(reply)
            return
        table([msgspec.to_builtins(f) for f in reply.findings], FINDING_COLUMNS, as_json=False)
        more = "" if reply.complete else " (there is more: narrow --since and --until)"
        print(f"{len(reply.findings)} findings in {reply.events} events{more}", file=sys.stderr)

    run(in_force if dry_run is None else tried, as_json=as_json)


def _defaults() -> dict[str, Any]:
    return {"threshold": 1, "window_s": 0.0, "measure": "events", "respond": "alert"}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{path}: {exc}", field="dry_run") from exc


@app.command("verify")
def verify(
    expect: Annotated[
        str | None, typer.Option(metavar="HASH", help="A head noted earlier for the same number.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Has the record's chain recomputed; ends with 1 where it breaks."""

    async def work() -> int:
        async with client() as c:
            chain = await c.audit.verify()
        good = chain.intact and expect in (None, chain.head)
        if as_json:
            emit(chain)
        elif not chain.intact:
            print(f"broken at {chain.broken_at}: {chain.reason}")
        else:
            behind = f" behind {chain.anchor}" if chain.anchor else ""
            print(f"intact: up to {chain.entries}{behind}, head {chain.head}")
            if not good:
                print(f"but the head is not {expect}")
        return 0 if good else 1

    run(work, as_json=as_json)


@app.command("explain")
def explain(
    finding: Annotated[str, typer.Argument(metavar="FINDING")], as_json: Json = False
) -> None:
    """Shows a finding, its rule, and the entries it rests on."""

    async def work() -> None:
        async with client() as c:
            found = await c.audit.explain(finding)
        if as_json:
            emit(found)
            return
        facts = msgspec.to_builtins(found.finding)
        for name, value in facts.items():
            if name not in ("evidence", "v") and value not in (None, "", [], {}):
                print(f"{name + ':':<14}{of_column(name, value)}")
        if found.rule is not None:
            print(f"{'rule says:':<14}{found.rule.title}; {found.rule.explanation}")
        print()
        rows = [{**_row(e), "rule": e.record.get("rule"), "verdict": e.record.get("verdict"),
                 "target": _target(e.record)} for e in found.evidence]  # fmt: skip
        table(rows, EVIDENCE_COLUMNS, as_json=False)

    run(work, as_json=as_json)


def _target(record: dict[str, Any]) -> str:
    to = record.get("destination") or {}
    address = to.get("domain") or to.get("address")
    named = f"{address}:{to.get('port', '')}" if address else ""
    return named or record.get("path") or record.get("subject") or record.get("syscall") or ""


@app.command("export")
def export(
    form: Annotated[str, typer.Option("--format", help="jsonl or ocsf.")] = "jsonl",
    kind: Kind = None,
    since: Since = None,
    until: Since = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1)] = None,
    of: Of = None,
) -> None:
    """Writes entries as JSON Lines, newest first: as they are, or as OCSF events."""

    async def work() -> None:
        if form not in ("jsonl", "ocsf"):
            raise InvalidRequest("jsonl or ocsf", field="format")
        async with client() as c:
            found = c.audit.list(
                project=of, kind=_known(kind), since=moment(since, "since"), limit=limit,
                until=moment(until, "until"),
            )  # fmt: skip
            async for line in _lines(found, form):
                print(line)

    run(work)


async def _lines(entries: AsyncIterator[Any], form: str) -> AsyncIterator[str]:
    async for entry in entries:
        yield json.dumps(ocsf.event(entry) if form == "ocsf" else _line(entry))


@app.command("suggest")
def suggest(
    sandbox: Annotated[str | None, typer.Argument(metavar="SANDBOX")] = None,
    job: Text = None,
    task: Text = None,
    since: Since = None,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Turns what was denied into the smallest change of policy. What a rule takes for an
    attack is named with that rule, and not to be allowed."""

    async def work() -> None:
        async with client() as c:
            reply = await c.audit.suggest(
                project=of, uid=sandbox and uid_of(sandbox), job=job, task=task,
                since=moment(since, "since"),
            )  # fmt: skip
        found = [msgspec.to_builtins(s) for s in reply.suggestions]
        table(found, SUGGEST_COLUMNS, as_json=as_json)
        if not found and not as_json:
            print("nothing was denied that a policy could allow", file=sys.stderr)

    run(work, as_json=as_json)
