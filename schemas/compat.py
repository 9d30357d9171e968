"""Whether a change of the schemas keeps to its version. Pure.

Inside a version a message may gain optional fields and a bound may widen; nothing
may go, become required, narrow or change its type.
"""

from __future__ import annotations

from typing import Any

_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
_IGNORED = frozenset({"title", "description", "default", *_LOWER, *_UPPER})


def breaking(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What ``new`` breaks of ``old`` (values of ``schemas.export.snapshot``)."""
    gone = [f"message {n} is gone" for n in old["messages"] if n not in new["messages"]]
    for name, schema in old["$defs"].items():
        if name not in new["$defs"]:
            gone.append(f"type {name} is gone")
        else:
            gone += _compare(schema, new["$defs"][name], name)
    return gone


def _compare(old: Any, new: Any, where: str) -> list[str]:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f"{where}: {old!r} became {new!r}"]
    found = _fields(old, new, where) + _bounds(old, new, where)
    for key in sorted((old.keys() | new.keys()) - _IGNORED - {"properties", "required"}):
        found += _keyword(old.get(key), new.get(key), f"{where}.{key}", key)
    return found


def _keyword(old: Any, new: Any, where: str, key: str) -> list[str]:
    if key == "enum" and old is not None and new is not None:
        return [f"{where}: {v!r} is gone" for v in old if v not in new]
    if key in ("anyOf", "prefixItems") and isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return [f"{where}: {len(old)} alternatives became {len(new)}"]
        pairs = zip(old, new, strict=True)
        return [t for i, (a, b) in enumerate(pairs) for t in _compare(a, b, f"{where}[{i}]")]
    if old is not None and new is None and key == "pattern":
        return []  # a bound that went is a wider one
    return _compare(old, new, where)


def _fields(old: dict[str, Any], new: dict[str, Any], where: str) -> list[str]:
    before, after = old.get("properties", {}), new.get("properties", {})
    found = [f"{where}.{name} is gone" for name in before if name not in after]
    required = set(new.get("required", [])) - set(old.get("required", []))
    found += [f"{where}.{name} became required" for name in sorted(required)]
    for name in before.keys() & after.keys():
        found += _compare(before[name], after[name], f"{where}.{name}")
    return found


def _bounds(old: dict[str, Any], new: dict[str, Any], where: str) -> list[str]:
    found = []
    for key in (*_LOWER, *_UPPER):
        was, is_ = old.get(key), new.get(key)
        if is_ is None or was == is_:
            continue
        if was is None or (is_ > was if key in _LOWER else is_ < was):
            found.append(f"{where}: {key} {was} became {is_}")
    return found
