"""All messages by name and version.

Owns: the list that export, documentation and the tests of compatibility go
through. Does not own: the messages.
"""

from __future__ import annotations

import inspect
from types import ModuleType

from schemas import (
    audit,
    base,
    burst,
    bus,
    control,
    exec,
    hotset,
    iam,
    image,
    job,
    node,
    sandbox,
    secret,
    trajectory,
)
from schemas.base import VERSION, Message, Versioned

MODULES: tuple[ModuleType, ...] = (
    base, sandbox, exec, control, iam, node, image, job, audit, burst, bus, trajectory,
    hotset, secret,
)  # fmt: skip


def _messages() -> dict[str, type[Versioned]]:
    found: dict[str, type[Versioned]] = {}
    for module in MODULES:
        for name, value in vars(module).items():
            local = inspect.isclass(value) and value.__module__ == module.__name__
            if not local or not issubclass(value, Versioned) or value is Versioned:
                continue
            if name in found:
                raise ValueError(f"two messages are called {name}")
            found[name] = value
    return found


MESSAGES: dict[str, type[Versioned]] = _messages()
"""Messages that stand alone on the bus, by name."""


def version(message: type[Message]) -> int:
    """The version of a message type; all are at the first one so far."""
    return VERSION


def full_name(name: str) -> str:
    """``CreateRequest`` → ``CreateRequest.v1``: the name of files and of AsyncAPI."""
    return f"{name}.v{version(MESSAGES[name])}"
