#!/usr/bin/env python3
"""Writes the generated parts of ARCHITECTURE.md: the lifecycle and the map of subjects.

    python scripts/diagrams.py            write
    python scripts/diagrams.py --check    exit with 1 where the page is not current
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from schemas.streams import DURABLES, EDGE_DURABLE, STREAMS  # noqa: E402
from schemas.subjects import SUBJECTS  # noqa: E402
from shared import lifecycle  # noqa: E402

PAGE = ROOT / "ARCHITECTURE.md"


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


PARTS = {"lifecycle": lifecycle_diagram, "subjects": subject_table, "streams": stream_table}


def rendered(page: str) -> str:
    """``page`` with its generated parts made anew. Raises ``KeyError`` for a part whose
    markers it lacks."""
    for name, make in PARTS.items():
        pattern = rf"(<!-- {name}: generated -->\n).*?(<!-- /{name} -->)"
        if not re.search(pattern, page, re.DOTALL):
            raise KeyError(f"{PAGE.name} has no place for {name}")
        part = make()
        page = re.sub(pattern, lambda m, p=part: f"{m[1]}{p}\n{m[2]}", page, flags=re.DOTALL)
    return page


def main() -> int:
    """Writes or checks."""
    page = PAGE.read_text()
    current = rendered(page)
    if "--check" in sys.argv[1:]:
        if page != current:
            print(f"{PAGE.name} is not current: run scripts/diagrams.py", file=sys.stderr)
        return int(page != current)
    PAGE.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main())
