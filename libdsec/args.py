"""What a sandbox is to be: run arguments, one class a backend.

Owns: conveniences (``(request, limit)`` pairs, ``timedelta``) and the check for
obvious nonsense. Does not own: what is allowed; the service judges again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, ClassVar

import msgspec

from libdsec._wire import SandboxSpec, misfit
from libdsec.errors import InvalidRequest

Seconds = float | timedelta
"""Seconds, or a ``timedelta``."""


def seconds(value: Seconds | None, name: str) -> float | None:
    """``value`` in seconds. Raises ``InvalidRequest`` for what is no duration."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name}: expected seconds, got {value!r}", field=name)
    if value != value or value in (float("inf"), float("-inf")):
        raise InvalidRequest(f"{name}: {value} is no duration; None means never", field=name)
    return float(value)


@dataclass(kw_only=True)
class DSecRunArgs:
    """Run arguments of any backend.

    ``container_image`` is a name ``name[:tag]``, or ``layers`` names them bottom to
    top: ``[base, workspace, *toolkits]``. ``cpu_cores_limit`` (cores) and
    ``memory_limit_mb`` (MiB) are a limit or a pair ``(request, limit)``;
    ``disk_limit_mb`` in MiB. ``ttl_running_stop``: seconds without use until
    ``on_timeout`` (``"stop"`` or ``"pause"``) happens; ``deadline_s``: seconds from the
    start until it is stopped, paused or not; ``None``: never. ``scoring_grace_s``: for how
    many seconds it then stands for a verifier (:meth:`Sandbox.verifying`), without the
    agent's processes. ``network_rules``: rule →
    allowed. ``policy`` is a policy document, its ``require`` names what must be
    enforced; or the name of one that the project keeps, ``name[:version]``. ``options`` are
    for the backend.
    ``routes``: name → port of the sandbox's loopback interface at which it reaches an
    address that the operator gave this name (needs a grant ``route.<name>``).
    ``secrets``: name of a secret of the project → ``{"hosts": [...]}`` with a ``"header"``
    (and ``"format"``, such as ``"Bearer {}"``) that requests there get, or ``"env"``, a
    variable with a placeholder for it (needs the grant ``secret.use``).
    """

    backend: str = "container"
    container_image: str | None = None
    layers: Sequence[str] | None = None
    cpu_cores_limit: float | tuple[float, float] | None = None
    memory_limit_mb: int | tuple[int, int] | None = None
    disk_limit_mb: int | None = None
    pids_limit: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    init_user: str | None = None
    ttl_running_stop: Seconds | None = None
    deadline_s: Seconds | None = None
    on_timeout: str = "stop"
    scoring_grace_s: Seconds | None = None
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    policy: Mapping[str, Any] | str | None = None
    qos: str = "best_effort"
    labels: Mapping[str, str] = field(default_factory=dict)
    job: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    routes: Mapping[str, int] = field(default_factory=dict)
    secrets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    _fixed_backend: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        if self._fixed_backend is not None:
            self.backend = self._fixed_backend

    def to_spec(self) -> dict[str, Any]:
        """The spec as plain data, without what was left at its default."""
        spec: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or (isinstance(value, Mapping | list | tuple) and not value):
                continue
            spec[item.name] = _plain(item.name, value)
        for name, short in (("cpu_cores_limit", "cpu_cores"), ("memory_limit_mb", "memory")):
            if isinstance(spec.get(name), tuple):
                request = "cpu_cores_request" if short == "cpu_cores" else "memory_request_mb"
                spec[request], spec[name] = spec[name]
        if isinstance(self.policy, str):
            spec["policy_name"] = spec.pop("policy")
        elif self.policy and self.policy.get("require"):
            spec["require"] = list(self.policy["require"])
        return spec

    def validate(self) -> SandboxSpec:
        """The spec, checked. Raises ``InvalidRequest`` naming the field."""
        spec = check_spec(self.to_spec())
        if spec.container_image is None and not spec.layers and spec.backend != "fake":
            raise InvalidRequest("name a container_image or layers", field="container_image")
        if spec.container_image is not None and spec.layers:
            raise InvalidRequest("container_image and layers exclude each other", field="layers")
        _ordered(spec.cpu_cores_request, spec.cpu_cores_limit, "cpu_cores_limit")
        _ordered(spec.memory_request_mb, spec.memory_limit_mb, "memory_limit_mb")
        return spec


@dataclass(kw_only=True)
class DSecContainerRunArgs(DSecRunArgs):
    """Run arguments of a container."""

    _fixed_backend = "container"


@dataclass(kw_only=True)
class DSecMicroVMRunArgs(DSecRunArgs):
    """Run arguments of a microVM."""

    backend: str = "microvm"
    _fixed_backend = "microvm"


@dataclass(kw_only=True)
class DSecVMRunArgs(DSecRunArgs):
    """Run arguments of a full virtual machine."""

    backend: str = "vm"
    _fixed_backend = "vm"


def check_spec(spec: Mapping[str, Any]) -> SandboxSpec:
    """The typed spec of plain data. Raises ``InvalidRequest`` naming the field."""
    try:
        return msgspec.convert(spec, SandboxSpec)
    except msgspec.ValidationError as exc:
        text, name = misfit(exc, SandboxSpec, spec)
        raise InvalidRequest(text, field=_argument(name)) from exc


def _argument(name: str | None) -> str | None:
    """A pair's half is reported under the argument that the caller wrote."""
    renamed = {"cpu_cores_request": "cpu_cores_limit", "memory_request_mb": "memory_limit_mb"}
    return renamed.get(name, name) if name else None


def _ordered(request: float | None, limit: float | None, name: str) -> None:
    if request is not None and limit is not None and request > limit:
        raise InvalidRequest(f"{name}: request {request} is over limit {limit}", field=name)


def _plain(name: str, value: Any) -> Any:
    if name in ("ttl_running_stop", "deadline_s", "scoring_grace_s"):
        return seconds(value, name)
    if name in ("cpu_cores_limit", "memory_limit_mb") and isinstance(value, tuple | list):
        if len(value) != 2:
            raise InvalidRequest(f"{name}: expected a limit or (request, limit)", field=name)
        return tuple(value)
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else value
