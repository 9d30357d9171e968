"""The driver port's optional protocol for policies; rules: :mod:`.base`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, runtime_checkable

from schemas.audit import Violation
from schemas.secret import GivenSecret
from services.edge.drivers.base import Handle, StartSpec

Vault = Callable[[str, str], Awaitable[Mapping[str, GivenSecret]]]
"""The present values of a sandbox's secrets, by project and uid."""


@runtime_checkable
class Enforcing(Protocol):
    """Optional: policies that change while a sandbox runs, and news of what is denied."""

    async def set_policy(self, handle: Handle, spec: StartSpec) -> Handle:
        """Puts ``spec.policy`` into force as a whole, also on open connections: what is
        no longer allowed is reset. A paused sandbox takes it as well. Returns the handle
        that says what enforces it now. Raises ``Unsupported`` or ``PolicyDenied`` naming
        the field, or another error, and then the old policy is in force; ``SandboxDied``
        where that cannot be, and the sandbox is to end."""
        ...

    def report_to(self, tell: Callable[[Violation], None]) -> None:
        """From now on every denial is told, with exact counts; id and node are left
        empty. Called once, before :meth:`Driver.open`."""
        ...

    def secrets_from(self, vault: Vault) -> None:
        """Where the values of secrets come from; they are asked for at each use, kept
        nowhere, and never inside a sandbox. Called once, before :meth:`Driver.open`."""
        ...
