"""What a spec must be beyond its types. Pure.

Owns: the bounds and combinations of a sandbox spec, each with an error that names the
field as the caller wrote it. Does not own: whether an image exists or a node can do it
(the scheduler finds out), nor quotas.

A field that this version does not know is refused, not ignored: a caller that asks for
a mount, a device or a protection must not get a sandbox without it.
"""

from __future__ import annotations

import msgspec

from schemas.base import BadMessage, WireError, decode
from schemas.sandbox import SandboxSpec
from services.auth import bindings
from shared import policies
from shared.errors import DsecError, InvalidRequest, Unsupported
from shared.wire import bad_message, to_wire

MAX_SPEC_BYTES = 512 * 1024
MAX_LABELS = 64
MAX_ENV = 1024
MAX_ENV_BYTES = 128 * 1024
"""Of names and values together: what the kernel takes for one exec, with room."""
MAX_NETWORK_RULES = 1024
MAX_REQUIRE = 64
MAX_ROUTES = 16
MAX_OPTIONS_BYTES = 64 * 1024

IMAGELESS = frozenset({"fake", "fncall"})
"""Backends that may run without an image."""

REQUIRABLE = frozenset(
    {
        "exec", "files", "ports", "routes", "pause", "reclaim", "snapshot", "cpu_limit",
        "memory_limit", "disk_limit", "pids_limit", "network", "display",
    }
)  # fmt: skip
"""Features of a backend that a spec may insist on; a node without one is passed over."""

_FIELDS = frozenset(SandboxSpec.__struct_fields__)
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])


def judge(raw: bytes, *, fork: bool = False) -> SandboxSpec | WireError:
    """The spec in ``raw``, or what is wrong with it."""
    try:
        spec = decode(raw, SandboxSpec)
        check(spec, raw)
        _branch(spec, fork=fork)
    except BadMessage as exc:
        return to_wire(bad_message(exc))
    except DsecError as exc:
        return to_wire(exc)
    return spec


def check(spec: SandboxSpec, raw: bytes) -> None:
    """Raises ``InvalidRequest`` or ``Unsupported`` naming the field."""
    if len(raw) > MAX_SPEC_BYTES:
        raise InvalidRequest(f"a spec has at most {MAX_SPEC_BYTES} bytes", field="payload")
    for name in _keys.decode(raw):
        if name not in _FIELDS:
            raise Unsupported(f"{name} is not supported", field=name)
    _environment(spec)
    _limits(spec)
    _sizes(spec)
    _features(spec)
    bindings.check_spec(spec)


def _branch(spec: SandboxSpec, *, fork: bool) -> None:
    if fork and spec.source is None:
        raise InvalidRequest("a fork names the sandbox it is of", field="source")
    if not fork and spec.source is not None:
        raise InvalidRequest("only a fork has a source", field="source")
    if not fork and spec.node is not None:
        raise Unsupported("node is not supported: the scheduler places", field="node")


def _environment(spec: SandboxSpec) -> None:
    if spec.container_image is not None and spec.layers:
        raise InvalidRequest("give container_image or layers, not both", field="layers")
    if spec.container_image is None and not spec.layers and spec.backend not in IMAGELESS:
        raise InvalidRequest(
            f"backend {spec.backend} needs container_image or layers", field="container_image"
        )
    for name, value in spec.env.items():
        if "\0" in value:
            raise InvalidRequest("a value of the environment holds no NUL", field=f"env.{name}")
    if spec.init_user is not None and any(c in spec.init_user for c in "\0\n/"):
        raise InvalidRequest("not a user: name or uid[:gid]", field="init_user")


def _limits(spec: SandboxSpec) -> None:
    pairs = (
        ("cpu_cores_request", spec.cpu_cores_request, spec.cpu_cores_limit),
        ("memory_request_mb", spec.memory_request_mb, spec.memory_limit_mb),
    )
    for name, request, limit in pairs:
        if request is not None and limit is not None and request > limit:
            raise InvalidRequest(f"{name} {request:g} is over its limit {limit:g}", field=name)


def _sizes(spec: SandboxSpec) -> None:
    counts = (
        ("labels", len(spec.labels), MAX_LABELS),
        ("env", len(spec.env), MAX_ENV),
        ("network_rules", len(spec.network_rules), MAX_NETWORK_RULES),
        ("require", len(spec.require), MAX_REQUIRE),
        ("routes", len(spec.routes), MAX_ROUTES),
    )
    for name, count, most in counts:
        if count > most:
            raise InvalidRequest(f"{name} has {count} entries, at most {most}", field=name)
    if len(set(spec.routes.values())) < len(spec.routes):
        raise InvalidRequest("each route has a port of its own", field="routes")
    size = sum(len(n.encode()) + len(v.encode()) for n, v in spec.env.items())
    if size > MAX_ENV_BYTES:
        raise InvalidRequest(f"env has {size} bytes, at most {MAX_ENV_BYTES}", field="env")
    if spec.options and len(msgspec.json.encode(spec.options)) > MAX_OPTIONS_BYTES:
        raise InvalidRequest(f"options has at most {MAX_OPTIONS_BYTES} bytes", field="options")


def _features(spec: SandboxSpec) -> None:
    if spec.policy is not None and spec.policy_name is not None:
        raise InvalidRequest("give policy or policy_name, not both", field="policy_name")
    strange = [
        name for name in spec.require
        if name not in REQUIRABLE and not policies.is_policy_part(name)
    ]  # fmt: skip
    if strange:
        raise Unsupported(f"cannot be required: {', '.join(strange)}", field="require")
    policy = policies.read(spec.policy, spec.network_rules, spec.require)
    policies.tightened(policy, spec.tighten)
