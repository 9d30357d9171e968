"""The gate's sockets, where something else is in their place."""

from __future__ import annotations

import socket

import pytest

from services.edge.egress import namespaces
from shared.errors import Conflict


def test_a_process_in_the_gates_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(namespaces, "_addresses", lambda: False)
        monkeypatch.setattr(namespaces, "GATE4", "127.0.0.1")
        monkeypatch.setattr(namespaces, "GATE_PORT", taken.getsockname()[1])
        with pytest.raises(Conflict) as caught:
            namespaces._open()
    assert caught.value.field == "network_rules"
