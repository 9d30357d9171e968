"""Messages of auth: projects, keys, grants, quotas, named policies, identity."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from schemas.base import Message, Token, UnixTime, Versioned

Grant = Annotated[
    str,
    Meta(pattern=r"^(\*|[a-z]+\.(\*|[a-z_]+))$(?!\n)", description="entity.verb, entity.* or *"),
]
Name = Annotated[str, Meta(min_length=1, max_length=63)]
PolicyName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$(?!\n)")]
PolicyReference = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9][a-z0-9_-]{0,62}(:[1-9][0-9]{0,8})?$(?!\n)",
        description="A policy's name, with a version where it is not the newest",
    ),
]


class Limits(Message, frozen=True):
    """A quota; ``None`` is no limit of its own (ancestors still bound it)."""

    sandboxes: Annotated[int, Meta(ge=0)] | None = None
    cores: Annotated[float, Meta(ge=0)] | None = None
    memory_mb: Annotated[int, Meta(ge=0)] | None = None
    creations_per_s: Annotated[float, Meta(gt=0)] | None = None


class Amounts(Message, frozen=True):
    """What is in use: sandboxes, cores, MiB."""

    sandboxes: int = 0
    cores: float = 0.0
    memory_mb: int = 0


class ProjectCreate(Versioned, frozen=True):
    """``req project.create``: a child of the subject's project. ``id`` is chosen by
    the caller or made from ``name``; it is one token and unique."""

    request_id: str
    name: Name
    id: Token | None = None
    quota: Limits | None = None


class ProjectDelete(Versioned, frozen=True):
    """``req project.delete``: ``id`` is the subject's project or a descendant."""

    request_id: str
    id: Token


class ProjectInfo(Message, frozen=True):
    """A project; ``path`` are the ids from the root."""

    id: Token
    name: str
    parent: Token | None
    path: list[str]
    created_at: UnixTime


class KeyCreate(Versioned, frozen=True):
    """``req key.create``: a new principal with a key. ``grants`` must be held by the
    caller in the project. ``kind`` node or service needs grant ``node.*``."""

    request_id: str
    name: Name
    grants: list[Grant] = []
    kind: Annotated[str, Meta(pattern=r"^(user|service|agent|node)$(?!\n)")] = "user"
    node: Token | None = None
    expires_in_s: Annotated[float, Meta(gt=0)] | None = None


class KeyDelete(Versioned, frozen=True):
    """``req key.delete``."""

    request_id: str
    id: str


class KeyInfo(Message, frozen=True):
    """A key. ``secret`` only in the answer to its creation."""

    id: str
    principal: str
    name: str
    kind: str
    project: Token
    grants: list[str]
    created_at: UnixTime
    expires_at: UnixTime | None = None
    revoked: bool = False
    secret: str | None = None


class GrantCreate(Versioned, frozen=True):
    """``req grant.create``: gives ``principal`` grants in the subject's project and
    everything below it."""

    request_id: str
    principal: str
    grants: Annotated[list[Grant], Meta(min_length=1)]


class GrantDelete(Versioned, frozen=True):
    """``req grant.delete``."""

    request_id: str
    principal: str
    grants: Annotated[list[Grant], Meta(min_length=1)]


class QuotaCreate(Versioned, frozen=True):
    """``req quota.create``: sets the limits of ``project`` (the subject's project's
    own only by someone who holds ``quota.create`` in its parent)."""

    request_id: str
    limits: Limits
    project: Token | None = None


class QuotaInfo(Message, frozen=True):
    """Limits and use of one project; ``used`` counts its descendants too."""

    project: Token
    limit: Limits
    used: Amounts


class PolicyCreate(Versioned, frozen=True):
    """``req policy.create``: a policy of the project under a name, as its next version.
    ``document`` as in a create's ``policy``; the same document again is no new version."""

    request_id: str
    name: PolicyName
    document: dict[str, Any]


class PolicyDelete(Versioned, frozen=True):
    """``req policy.delete``: one version of it, or all."""

    request_id: str
    name: PolicyName
    version: Annotated[int, Meta(ge=1)] | None = None


class PolicyInfo(Message, frozen=True):
    """A named policy. ``document`` is empty in lists."""

    name: str
    version: int
    project: Token
    created_at: UnixTime
    created_by: str
    document: dict[str, Any] = {}


class IamQuery(Versioned, frozen=True):
    """``get project.list|key.list|quota.get|grant.list|whoami.get|policy.get|policy.list``.
    ``policy``: ``name[:version]``."""

    project: Token | None = None
    principal: str | None = None
    policy: PolicyReference | None = None


class IamReply(Versioned, frozen=True):
    """The answer to every iam request: the fields that apply are set."""

    request_id: str | None = None
    project: ProjectInfo | None = None
    projects: list[ProjectInfo] | None = None
    key: KeyInfo | None = None
    keys: list[KeyInfo] | None = None
    quota: QuotaInfo | None = None
    grants: list[str] | None = None
    principal: str | None = None
    policy: PolicyInfo | None = None
    policies: list[PolicyInfo] | None = None


class PrincipalsChanged(Versioned, frozen=True):
    """auth → every instance of auth, ``dsec.rpc.v1.auth.forget``: the keys or grants of
    these have changed; nothing is answered."""

    principals: list[str]
