"""``python -m schemas.export [--check]``: what others read of the schemas.

Owns: writing ``schemas/generated/`` (a JSON Schema per message, AsyncAPI, the lock
of this version), ``libdsec/_wire.py`` and the SDK's copies of modules that both ends of
the bus need. With ``--check`` it writes nothing and
fails when a file is not current. The lock only ever grows: it is rewritten only
after :mod:`schemas.compat` found nothing but optional additions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from schemas import asyncapi, compat, sdk_source
from schemas.registry import MESSAGES, full_name

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "schemas" / "generated"
LOCK = GENERATED / "v1.lock.json"
WIRE = ROOT / "libdsec" / "_wire.py"
COPIED = {ROOT / "libdsec" / "_quick.py": ROOT / "shared" / "quick.py"}
"""The SDK imports nothing of ours: it has copies, by where they are from."""


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a message."""
    schema = msgspec.json.schema(MESSAGES[name])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def snapshot() -> dict[str, Any]:
    """All messages' schemas in one value: what the lock holds."""
    _, components = msgspec.json.schema_components(
        MESSAGES.values(), ref_template="#/$defs/{name}"
    )
    return {"messages": sorted(MESSAGES), "$defs": components}


def rendered() -> dict[Path, str]:
    """Every generated file and its content."""
    files = {GENERATED / f"{full_name(n)}.json": _json(json_schema(n)) for n in MESSAGES}
    files[GENERATED / "asyncapi.json"] = _json(asyncapi.document())
    files[LOCK] = _json(snapshot())
    files[WIRE] = sdk_source.source()
    return files | {copy: source.read_text() for copy, source in COPIED.items()}


def stale() -> list[Path]:
    """Files that are missing, not current, or generated from nothing any more."""
    files = rendered()
    wrong = [p for p, text in files.items() if not p.exists() or p.read_text() != text]
    return wrong + [p for p in GENERATED.glob("*.json") if p not in files]


def breaking_changes() -> list[str]:
    """What the present schemas break of the locked version; empty is right."""
    if not LOCK.exists():
        return []
    return compat.breaking(json.loads(LOCK.read_text()), snapshot())


def main(argv: list[str]) -> int:
    """Writes or checks; returns the exit code."""
    problems = [f"breaks version 1: {text}" for text in breaking_changes()]
    if "--check" in argv:
        problems += [f"not current: {path.relative_to(ROOT)}" for path in stale()]
    elif not problems:
        GENERATED.mkdir(exist_ok=True)
        for path in stale():
            path.unlink(missing_ok=True)
        for path, text in rendered().items():
            path.write_text(text)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
