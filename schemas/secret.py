"""Messages about secrets: values that a project keeps and no sandbox ever sees.

Owns: their form, from a client to auth and from auth to an edge. Does not own: where a
value is kept (services/auth) or put into a request (:mod:`services.edge.egress`). What
carries a value is sent, never stored by the bus, and shows no value in its ``repr``.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas.base import Message, UnixTime, Versioned

SecretName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$(?!\n)")]
SecretValue = Annotated[str, Meta(min_length=1, max_length=8192)]
Host = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?$(?!\n)",
        description="A host name, with a port where it is neither 443 nor 80",
    ),
]
HostPattern = Annotated[
    str,
    Meta(
        pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?$(?!\n)",
        description="A host, or *.domain for all names below it",
    ),
]
HeaderName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$(?!\n)")]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$(?!\n)")]


class SecretBinding(Message, frozen=True):
    """How a sandbox uses a secret, at ``hosts`` only. ``header``: every request there gets
    this header with ``format``, whose ``{}`` is the value; one that it has is replaced.
    ``env``: a variable of the sandbox with a placeholder, which becomes the value wherever
    a header of a request there carries it."""

    hosts: Annotated[list[Host], Meta(min_length=1, max_length=16)]
    header: HeaderName | None = None
    format: Annotated[str, Meta(min_length=2, max_length=256)] = "{}"
    env: Variable | None = None


class SecretSet(Versioned, frozen=True):
    """``put secret.set``: a new value, or a first one. ``hosts``: where it may ever go.
    ``plain``: also over HTTP without TLS."""

    request_id: str
    name: SecretName
    value: SecretValue
    hosts: Annotated[list[HostPattern], Meta(min_length=1, max_length=64)]
    plain: bool = False

    def __repr__(self) -> str:
        return f"SecretSet(name={self.name!r}, hosts={self.hosts!r})"


class SecretRemove(Versioned, frozen=True):
    """``put secret.remove``."""

    request_id: str
    name: SecretName


class SecretInfo(Message, frozen=True):
    """A secret without its value. ``version`` counts its values."""

    name: str
    version: int
    hosts: list[str]
    plain: bool
    changed_at: UnixTime
    changed_by: str


class SecretReply(Versioned, frozen=True):
    """The answer about secrets: the fields that apply are set."""

    request_id: str | None = None
    secret: SecretInfo | None = None
    secrets: list[SecretInfo] | None = None


class SecretsWanted(Versioned, frozen=True):
    """edge → auth, ``dsec.rpc.v1.auth.secrets.<node>``: the values that a sandbox of this
    node is bound to."""

    uid: str
    project: str


class GivenSecret(Message, frozen=True):
    """A value for the hosts of its binding."""

    value: str
    plain: bool = False

    def __repr__(self) -> str:
        return "GivenSecret()"


class SecretsGiven(Versioned, frozen=True):
    """Values by name; what was removed, or may not go where it is bound to, is missing."""

    secrets: dict[str, GivenSecret]

    def __repr__(self) -> str:
        return f"SecretsGiven({sorted(self.secrets)})"
