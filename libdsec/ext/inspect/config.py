"""What a task says about its sandboxes: the YAML file or the same as a model.

Owns: the fields, ``${SAMPLE_METADATA_<KEY>}`` in their values, the translation to run
arguments. Does not own: whether the service accepts them.

    image: py:3.11
    user: agent
    workdir: /home/agent
    limits: {cpu_cores: 2, memory_mb: 4096}

With several sandboxes a sample, ``sandboxes`` maps names to such blocks; the one called
``default``, else the first, is the default one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from libdsec.args import DSecRunArgs

CREATE_TIMEOUT_S = 300.0
IDLE_TIMEOUT_S = 7200.0
"""A sandbox that an evaluation left behind without a word ends after this long."""
DEFAULT = "default"
VARIABLE = re.compile(r"\$\{(SAMPLE_METADATA_[A-Z0-9_]+)\}")


class ConfigError(ValueError):
    """The configuration is missing or wrong; the text says where."""


class Limits(BaseModel):
    """Cores, MiB of memory, MiB of disk, processes; ``None``: the service's default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_cores: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    pids: int | None = None


class SandboxConfig(BaseModel):
    """One sandbox. ``image`` is a name ``name[:tag]``, or ``layers`` names them bottom to
    top. ``user``: who commands and files belong to by default (else the image's).
    ``workdir``: where relative paths begin, made where it is missing (else the
    image's). ``idle_timeout_s``, ``deadline_s``: seconds until it ends by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = None
    layers: list[str] = []
    backend: str = "container"
    user: str | None = None
    workdir: str | None = Field(default=None, pattern="^/")
    env: dict[str, str] = {}
    limits: Limits = Limits()
    network_rules: dict[str, bool] = {}
    policy: dict[str, Any] | None = None
    labels: dict[str, str] = {}
    options: dict[str, Any] = {}
    idle_timeout_s: float | None = IDLE_TIMEOUT_S
    deadline_s: float | None = None

    def run_args(self, labels: Mapping[str, str]) -> DSecRunArgs:
        """The SDK's arguments, with ``labels`` besides its own."""
        return DSecRunArgs(
            backend=self.backend,
            container_image=self.image,
            layers=self.layers or None,
            cpu_cores_limit=self.limits.cpu_cores,
            memory_limit_mb=self.limits.memory_mb,
            disk_limit_mb=self.limits.disk_mb,
            pids_limit=self.limits.pids,
            env=self.env,
            workdir=self.workdir,
            init_user=self.user,
            ttl_running_stop=self.idle_timeout_s,
            deadline_s=self.deadline_s,
            network_rules=self.network_rules,
            policy=self.policy,
            labels={**self.labels, **labels},
            options=self.options,
        )

    @property
    def images(self) -> list[str]:
        """Names of the images it needs."""
        return [*([self.image] if self.image else []), *self.layers]


class DSecSandboxConfig(SandboxConfig):
    """The whole of it: one sandbox, or several under ``sandboxes``. ``create_timeout_s``
    bounds the wait until all of a sample are ready."""

    sandboxes: dict[str, SandboxConfig] = {}
    create_timeout_s: float = Field(default=CREATE_TIMEOUT_S, gt=0)

    @model_validator(mode="after")
    def _one_way(self) -> DSecSandboxConfig:
        given = self.model_fields_set - {"sandboxes", "create_timeout_s"}
        if self.sandboxes and given:
            raise ValueError(f"{', '.join(sorted(given))}: belongs into each of `sandboxes`")
        for name, one in self.named().items():
            if bool(one.image) == bool(one.layers) and one.backend != "fake":
                raise ValueError(f"sandbox {name}: name an image or layers")
        return self

    def named(self) -> dict[str, SandboxConfig]:
        """Name → sandbox, the default one first."""
        if not self.sandboxes:
            return {DEFAULT: self}
        first = DEFAULT if DEFAULT in self.sandboxes else next(iter(self.sandboxes))
        return {first: self.sandboxes[first], **self.sandboxes}


def load(config: Any, metadata: Mapping[str, Any] | None = None) -> DSecSandboxConfig:
    """The configuration of a file's path or a model, with a sample's metadata put in.
    Raises ``ConfigError``."""
    values = metadata_variables(metadata or {})
    try:
        return DSecSandboxConfig.model_validate(_filled(_plain(config), values))
    except (ValidationError, yaml.YAMLError) as exc:
        raise ConfigError(f"{_origin(config)}: {exc}") from exc


def variables_in(config: Any, metadata: Mapping[str, Any]) -> dict[str, str]:
    """The variables of ``metadata`` that ``config`` mentions."""
    text = str(_plain(config))
    mentioned = set(VARIABLE.findall(text))
    return {k: v for k, v in metadata_variables(metadata).items() if k in mentioned}


def metadata_variables(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Sample metadata under the names that Inspect gives it."""
    return {f"SAMPLE_METADATA_{k.replace(' ', '_').upper()}": str(v) for k, v in metadata.items()}


def _plain(config: Any) -> Any:
    if config is None:
        raise ConfigError('the dsec sandbox needs a configuration: sandbox=("dsec", "dsec.yaml")')
    if isinstance(config, BaseModel):
        return config.model_dump(exclude_unset=True)
    path = Path(str(config))
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """``value`` with the variables replaced, from the sample or the environment. Values,
    never structure: metadata cannot add a field."""
    if isinstance(value, str):
        return VARIABLE.sub(lambda m: values.get(m[1]) or os.environ.get(m[1]) or m[0], value)
    if isinstance(value, dict):
        return {k: _filled(v, values) for k, v in value.items()}
    return [_filled(v, values) for v in value] if isinstance(value, list) else value


def _origin(config: Any) -> str:
    return type(config).__name__ if isinstance(config, BaseModel) else str(config)
