"""From a document to rules. Pure.

Owns: checking a document, working in presets and stages. Every error names the field as
the caller wrote it: ``policy.files.hidden[2]``, ``network_rules.pipy``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from schemas.policy import Limits, PolicyDocument, Stage
from shared.errors import InvalidRequest, Unsupported
from shared.policies.model import DENIABLE, TREES, WATCHED, FileRule, Policy
from shared.policies.network import NetworkRule, parse
from shared.policies.presets import PRESETS

MAX_NETWORK_RULES = 1024
NOTHING = Policy()
REQUIRED = re.compile(r"^(network|files|processes|resources)(\.[a-z_]+)?$(?!\n)")
_PARTS: Mapping[str, frozenset[str]] = {
    "files": frozenset((*TREES, WATCHED)),
    "processes": frozenset({*DENIABLE, "ioctl", "exec"}),
    "resources": frozenset(Limits.__struct_fields__),
    "network": frozenset(),
}


def read(
    document: Mapping[str, Any] | None,
    network_rules: Mapping[str, bool],
    require: Iterable[str] = (),
) -> Policy:
    """The policy of a sandbox: ``network_rules`` count for more than the document's own;
    of ``require`` what names parts of a policy is added. Raises ``InvalidRequest`` or
    ``Unsupported`` naming the field."""
    if not document and not network_rules and not require:
        return NOTHING  # nearly every sandbox
    given = (document or {}, network_rules, tuple(require))
    try:
        text = msgspec.msgpack.encode(given)
    except (TypeError, ValueError, OverflowError):  # nothing that is kept, nor right
        return _read(*given)
    return _known(text)


@lru_cache(maxsize=64)
def _known(text: bytes) -> Policy:
    """A create's are read several times on its way, and a rollout's sandboxes have the same."""
    return _read(*msgspec.msgpack.decode(text))


def _read(
    document: Mapping[str, Any], network_rules: Mapping[str, bool], require: Iterable[str]
) -> Policy:
    given = _typed(document)
    base = PRESETS[given.preset] if given.preset else PolicyDocument()
    name = given.stage
    present = _stage(given, name)
    network = _network(base, given, present, network_rules)
    deny, ioctls, execs = denied_calls(
        [
            ("", base.processes.deny),
            ("policy.processes.deny", given.processes.deny),
            *_of_stage(present, name),
        ]
    )
    for other, content in given.stages.items():  # also those that are not in force yet
        _network(base, given, content, {})
        denied_calls(_of_stage(content, other))
    files = {
        tree: _files(tree, getattr(base.files, tree), getattr(given.files, tree))
        for tree in (*TREES, WATCHED)
    }
    return Policy(
        network=network, deny=deny, ioctls=ioctls, exec_deny=execs, limits=given.resources,
        require=_required(given.require, require), stage=name or "",
        stages=tuple(given.stages), **files,
    )  # fmt: skip


def _typed(document: Mapping[str, Any]) -> PolicyDocument:
    try:
        return msgspec.convert(document, PolicyDocument)
    except msgspec.ValidationError as exc:
        text, _, path = str(exc).partition(" - at `")
        path = path.removeprefix("key` in `").rstrip("`").removeprefix("$").replace("[...]", "")
        unknown = re.search(r"unknown field `([^`]*)`", text)
        name = f"policy{path}" + (f".{unknown.group(1)}" if unknown else "")
        if unknown:
            raise Unsupported(f"a policy has no {name}", field=name) from exc
        raise InvalidRequest(text, field=name) from exc


def _stage(given: PolicyDocument, name: str | None) -> Stage:
    if not name:
        return Stage()
    if name not in given.stages:
        known = ", ".join(given.stages) or "none"
        raise InvalidRequest(f"the policy has no stage {name!r} (it has: {known})", field="stage")
    return given.stages[name]


def _network(
    base: PolicyDocument, given: PolicyDocument, stage: Stage, rules: Mapping[str, bool]
) -> tuple[NetworkRule, ...]:
    """Later sources replace rules of the same text in earlier ones."""
    merged: dict[str, tuple[bool, str]] = {}
    sources = (
        (base.network, "policy.preset"), (given.network, "policy.network"),
        (rules, "network_rules"), (stage.network or {}, "policy.stages"),
    )  # fmt: skip
    for source, field in sources:
        for text, allow in source.items():
            merged[text.strip().lower()] = (allow, f"{field}.{text}")
    if len(merged) > MAX_NETWORK_RULES:
        raise InvalidRequest(f"at most {MAX_NETWORK_RULES} rules", field="network_rules")
    found: list[NetworkRule] = []
    for text, (allow, field) in merged.items():
        found += parse(text, allow, field=field)
    return tuple(found)


def _of_stage(stage: Stage, name: str | None) -> list[tuple[str, list[str]]]:
    if stage.processes is None:
        return []
    return [(f"policy.stages.{name}.processes.deny", stage.processes.deny)]


def denied_calls(
    sources: Iterable[tuple[str, list[str]]],
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]:
    names: dict[str, None] = {}
    ioctls: dict[int, None] = {}
    execs: dict[str, None] = {}
    for field, rules in sources:
        for number, rule in enumerate(rules):
            where = f"{field}[{number}]"
            kind, _, value = rule.partition(":")
            if rule in DENIABLE:
                names[rule] = None
            elif kind == "ioctl" and value:
                ioctls[_ioctl(value, where)] = None
            elif kind == "exec" and value:
                execs[_path(value, where).path] = None
            else:
                known = ", ".join(DENIABLE)
                text = f"{rule!r} cannot be denied (known: {known}, ioctl:0x…, exec:/path)"
                raise Unsupported(text, field=where)
    return tuple(names), tuple(ioctls), tuple(execs)


def _ioctl(text: str, field: str) -> int:
    try:
        number = int(text, 0)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 32:
        raise InvalidRequest(f"{text!r} is no ioctl request number", field=field)
    return number


def _files(tree: str, base: list[str], given: list[str]) -> tuple[FileRule, ...]:
    rules = {rule.path: rule for rule in (_path(p, "policy.preset") for p in base)}
    for number, text in enumerate(given):
        rule = _path(text, f"policy.files.{tree}[{number}]")
        rules[rule.path] = rule
    return tuple(rules.values())


def _path(text: str, field: str) -> FileRule:
    path, optional = text.removesuffix("?"), text.endswith("?")
    if not path.startswith("/") or "\0" in path or "\n" in path:
        raise InvalidRequest(f"{text!r} is no absolute path", field=field)
    if ".." in path.split("/"):
        raise InvalidRequest(f"{text!r} holds '..'", field=field)
    normal = "/" + posixpath.normpath(path).lstrip("/")
    return FileRule(normal, optional)


def is_policy_part(name: str) -> bool:
    """Whether ``require`` may name it as a part of a policy."""
    if not REQUIRED.match(name):
        return False
    part, _, rule = name.partition(".")
    return not rule or rule in _PARTS[part]


def _required(names: list[str], more: Iterable[str]) -> tuple[str, ...]:
    for number, name in enumerate(names):
        if not is_policy_part(name):
            raise Unsupported(f"{name!r} cannot be required", field=f"policy.require[{number}]")
    return tuple(dict.fromkeys((*names, *filter(is_policy_part, more))))
