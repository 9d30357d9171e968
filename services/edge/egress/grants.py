"""Which addresses names have opened for one sandbox, and until when. Pure: time is given.

Owns: the bookkeeping. Does not own: whether a name may open an address
(:mod:`services.edge.policy.reach`), the kernel's map.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.policies.network import Address

HOLD_S = 60.0
"""An address stays open at least so long: programs keep answers beyond their time to
live, and answers that rotate must not close what was just opened."""
GRACE_S = 5.0
ADDRESSES_MAX = 4096
NAMES_MAX = 32
"""Of one address: below a wildcard there are names without end. The one that ends first
makes room; it is asked for again where a connection names it."""


@dataclass(slots=True)
class Grants:
    """Names by address, each with the time at which it ends."""

    until: dict[Address, dict[str, float]] = field(default_factory=dict)

    def add(
        self, name: str, addresses: Iterable[Address], ttl_s: float, *, now: float
    ) -> list[Address]:
        """Opens addresses for a name. Returns those for which there was room."""
        end = now + max(ttl_s, HOLD_S) + GRACE_S
        kept: list[Address] = []
        for address in addresses:
            if address not in self.until and len(self.until) >= ADDRESSES_MAX:
                continue
            names = self.until.setdefault(address, {})
            if name not in names and len(names) >= NAMES_MAX:
                del names[min(names, key=names.__getitem__)]
            names[name] = max(end, names.get(name, 0.0))
            kept.append(address)
        return kept

    def names(self, address: Address) -> list[str]:
        """The names that opened an address."""
        return list(self.until.get(address, ()))

    def addresses(self, name: str) -> list[Address]:
        """The addresses that a name opened, the newest last."""
        return [a for a, names in self.until.items() if name in names]

    def expire(self, now: float) -> list[Address]:
        """Ends what is over; the addresses of which something ended."""
        changed = []
        for address, names in list(self.until.items()):
            over = [name for name, end in names.items() if end <= now]
            for name in over:
                del names[name]
            if over:
                changed.append(address)
            if not names:
                del self.until[address]
        return changed
