#!/usr/bin/env python3
"""Writes the generated parts of the documents: the lifecycle, streams, the map of subjects.

    python scripts/diagrams.py            write
    python scripts/diagrams.py --check    exit with 1 where a page is not current
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from schemas.streams import DURABLES, EDGE_DURABLE, STREAMS  # noqa: E402
from schemas.subjects import SUBJECTS  # noqa: E402
from shared import lifecycle  # noqa: E402

KINDS = {
    "req": "requests that change something",
    "get": "reads",
    "put": "values of secrets, which no stream keeps",
    "exec": "operations in a sandbox, one hop",
    "out": "their frames and answers",
    "blob": "bytes of images",
    "cmd": "commands",
    "evt": "facts",
    "sec": "what sandboxes were denied",
    "trj": "the trajectory log",
    "audit": "findings",
    "rpc": "questions between services",
    "hb": "heartbeats",
    "dlq": "what was given up, with its cause",
}


def lifecycle_diagram() -> str:
    """The table of transitions as a Mermaid state diagram, one arrow a pair of states."""
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for t in lifecycle.TRANSITIONS:
        if t.source != t.target:
            arrows[t.source, t.target].append(f"{t.event} ({t.by})")
    lines = ["```mermaid", "stateDiagram-v2", "  [*] --> requested"]
    lines += [f"  {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    lines += [f"  {s} --> [*]" for s in lifecycle.STATES if s in lifecycle.TERMINAL]
    return "\n".join([*lines, "```"])


def subject_table() -> str:
    """Every subject with its transport, parties and message."""
    lines = ["| subject | transport | from → to | message |", "|---|---|---|---|"]
    for row in SUBJECTS:
        sender = row.sender.replace("|", ", ")
        parties = f"{sender} → {', '.join(row.receivers)}"
        lines.append(
            f"| `{row.pattern}` | {row.transport} | {parties} | `{row.message}`: {row.doc} |"
        )
    return "\n".join(lines)


def kind_table() -> str:
    """Subjects by kind: who sends, who reads. Raises ``KeyError`` for a kind without words."""
    senders: dict[str, set[str]] = {kind: set() for kind in KINDS}
    receivers: dict[str, set[str]] = {kind: set() for kind in KINDS}
    transports: dict[str, str] = {}
    for row in SUBJECTS:
        kind = row.pattern.split(".")[1]
        senders[kind] |= set(row.sender.split("|"))
        receivers[kind] |= set(row.receivers)
        transports[kind] = row.transport
    lines = ["| kind | what | transport | from → to |", "|---|---|---|---|"]
    for kind, what in KINDS.items():
        parties = " → ".join(", ".join(sorted(who[kind])) for who in (senders, receivers))
        lines.append(f"| `{kind}` | {what} | {transports[kind]} | {parties} |")
    return "\n".join(lines)


def edge_table() -> str:
    """The edge's packages, as their first lines describe them."""
    lines = ["| package | what is in it |", "|---|---|"]
    for path in sorted((ROOT / "services/edge").glob("*/__init__.py")):
        words = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines.append(f"| `{path.parent.name}/` | {words.partition(chr(10))[0]} |")
    return "\n".join(lines)


def stream_table() -> str:
    """Streams and their durable consumers."""
    readers: dict[str, list[str]] = defaultdict(list)
    for durable in (*DURABLES, EDGE_DURABLE):
        readers[durable.stream].append(f"`{durable.name}`")
    lines = ["| stream | keeps | at most | durables |", "|---|---|---|---|"]
    for stream in STREAMS:
        consumers = ", ".join(readers[stream.name]) or "(listeners only)"
        lines.append(
            f"| `{stream.name}` | {stream.max_age_s // 3600} h | {stream.max_bytes >> 30} GiB "
            f"| {consumers} |"
        )
    return "\n".join(lines)


PAGES = {
    "ARCHITECTURE.md": {"edge": edge_table, "streams": stream_table, "kinds": kind_table},
    "docs/lifecycle.md": {"lifecycle": lifecycle_diagram},
    "docs/subjects.md": {"subjects": subject_table},
}


def rendered(name: str, page: str) -> str:
    """``page`` with its generated parts made anew. Raises ``KeyError`` for a part whose
    markers it lacks."""
    for part, make in PAGES[name].items():
        pattern = rf"(<!-- {part}: generated -->\n).*?(<!-- /{part} -->)"
        if not re.search(pattern, page, re.DOTALL):
            raise KeyError(f"{name} has no place for {part}")
        text = make()
        page = re.sub(pattern, lambda m, t=text: f"{m[1]}{t}\n{m[2]}", page, flags=re.DOTALL)
    return page


def main() -> int:
    """Writes or checks."""
    stale = []
    for name in PAGES:
        page = (ROOT / name).read_text()
        current = rendered(name, page)
        if page != current:
            stale.append(name)
            if "--check" not in sys.argv[1:]:
                (ROOT / name).write_text(current)
    if stale and "--check" in sys.argv[1:]:
        print(f"not current: {', '.join(stale)}; run scripts/diagrams.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
