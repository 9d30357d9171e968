"""Ports for servers: none twice, none that an outgoing connection may sit on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from devstack import process
from devstack.process import StartError, free_port

MANY = 300


def test_no_port_is_given_twice_or_chosen_for_outgoing_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("32768\t60999\n")
    monkeypatch.setattr(process, "EPHEMERAL", tmp_path / "range")
    ports = [free_port() for _ in range(MANY)]
    assert len(set(ports)) == MANY
    assert all(process.PORTS_FROM <= port < 32768 for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


def test_where_all_ports_are_for_outgoing_connections_the_kernel_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(process, "EPHEMERAL", tmp_path / "range")
    assert len({free_port() for _ in range(MANY)}) == MANY


def test_without_a_free_one_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "range").write_text(f"{port + 1}\t65535\n")
        monkeypatch.setattr(process, "EPHEMERAL", tmp_path / "range")
        monkeypatch.setattr(process, "PORTS_FROM", port)
        with pytest.raises(StartError, match="no free port"):
            free_port()
