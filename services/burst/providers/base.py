"""The port to a cloud. This prose is its specification.

A provider makes and ends machines whose edge joins by heartbeat with pool ``cloud``;
burst learns that a node is there from its heartbeat, never from the provider.

- ``lease`` asks for one machine. ``lease_id`` is the idempotency key: a repetition
  after a crash returns the same node name and makes no second machine. It returns as
  soon as the provider has taken the order.
- ``release`` ends a machine for good. Ending one that is gone already is no error.
- Both raise ``Unavailable`` for what may work later, any other ``DsecError`` for what
  will not.
- A provider that cannot lease says so by ``supported = False`` with a ``reason``; it
  is then never asked.
"""

from __future__ import annotations

from typing import Protocol


class Provider(Protocol):
    """A source of cloud nodes."""

    name: str
    supported: bool
    reason: str

    async def lease(self, lease_id: str) -> str:
        """Orders a machine; returns the name its edge will join by."""
        ...

    async def release(self, node: str) -> None:
        """Ends a machine."""
        ...
