"""The gate's sockets, where something else is in their place."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from services.edge.egress import namespaces
from shared.errors import Conflict, Unavailable


def test_a_process_in_the_gates_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(namespaces, "_addresses", lambda: False)
        monkeypatch.setattr(namespaces, "GATE4", "127.0.0.1")
        monkeypatch.setattr(namespaces, "GATE_PORT", taken.getsockname()[1])
        with pytest.raises(Conflict) as caught:
            namespaces._open()
    assert caught.value.field == "network_rules"


def test_a_process_that_is_not_the_containers_is_not_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces, "within", lambda *_: pytest.fail("entered"))
    with pytest.raises(Unavailable):
        namespaces.open_inside(os.getpid(), "f" * 64)
    with subprocess.Popen(["true"]) as gone:
        pass
    with pytest.raises(Unavailable):
        namespaces.open_inside(gone.pid, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="entering a namespace needs root")
def test_a_namespace_is_entered_by_a_process_in_it() -> None:
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo up; exec sleep 60"], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        process = os.pidfd_open(holder.pid)
        there = namespaces.within(process, lambda: os.readlink("/proc/thread-self/ns/net"))
        os.close(process)
        assert there == os.readlink(f"/proc/{holder.pid}/ns/net")
        assert there != os.readlink("/proc/self/ns/net")
    finally:
        holder.kill()
        holder.communicate()
