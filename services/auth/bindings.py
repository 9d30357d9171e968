"""What a sandbox may be bound to. Pure.

Owns: whether a secret may go where a binding sends it, and what a binding must look like.
Does not own: who may bind (grants). A secret's own hosts bound every use of it: whoever
may use one could else send it to a host of his own and read it there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from schemas.sandbox import SandboxSpec
from schemas.secret import SecretBinding, SecretInfo
from shared.errors import Forbidden, InvalidRequest, NotFound

MAX_SECRETS = 16
RESERVED_HEADERS = frozenset(
    {
        "host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer",
        "expect",
    }
)  # fmt: skip
"""They say how a request is read."""


def check_value(value: str) -> None:
    """Raises ``InvalidRequest`` for what is no value of a header."""
    if not value.isascii() or any(c < " " or c == "\x7f" for c in value):
        raise InvalidRequest("a value is printable ASCII on one line", field="value")
    if value != value.strip():
        raise InvalidRequest("a value neither begins nor ends with a space", field="value")


def check_spec(spec: SandboxSpec) -> None:
    """Raises ``InvalidRequest`` naming the field."""
    if len(spec.secrets) > MAX_SECRETS:
        raise InvalidRequest(f"at most {MAX_SECRETS} secrets", field="secrets")
    taken = set(spec.env)
    for name, binding in spec.secrets.items():
        field = f"secrets.{name}"
        if binding.header is None and binding.env is None:
            raise InvalidRequest("name a header, or a variable for a placeholder", field=field)
        if (binding.header or "").lower() in RESERVED_HEADERS:
            raise InvalidRequest(f"{binding.header} is not for secrets", field=f"{field}.header")
        _check_format(binding, f"{field}.format")
        if binding.env is not None and binding.env in taken:
            raise InvalidRequest(f"{binding.env} is set twice", field=f"{field}.env")
        taken.add(binding.env or "")


def _check_format(binding: SecretBinding, field: str) -> None:
    text = binding.format
    if text.count("{}") != 1 or not text.isascii() or any(c < " " or c == "\x7f" for c in text):
        raise InvalidRequest("a format is one line with one {}", field=field)


def judge(spec: SandboxSpec, known: Mapping[str, SecretInfo]) -> None:
    """Raises ``NotFound`` or ``Forbidden`` where one is not there, or may not go there."""
    for name, binding in spec.secrets.items():
        info = known.get(name)
        if info is None:
            raise NotFound(f"the project has no secret {name}", field=f"secrets.{name}")
        strange = outside(info.hosts, binding)
        if strange:
            raise Forbidden(
                f"secret {name} may not go to {', '.join(strange)}",
                field=f"secrets.{name}.hosts",
            )


def outside(allowed: Collection[str], binding: SecretBinding) -> list[str]:
    """The hosts of a binding to which its secret may not go."""
    return [host for host in binding.hosts if not any(_covers(p, host) for p in allowed)]


def _covers(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return pattern == host
