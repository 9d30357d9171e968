"""scripts/docker-engine.sh in a machine of its own: private mounts, processes and network.

``/run`` and ``/var/lib/docker`` are empty there and PID 1 reaps nothing but its child,
so the machine's own engine is neither seen nor touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="starting an engine needs root"),
]

SCRIPT = Path(__file__).parents[3] / "scripts" / "docker-engine.sh"
TIMEOUT_S = 240

_PRELUDE = """
set -eu
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib/docker
mount -t proc proc /proc
unset DOCKER_HOST
alive() { ps -eo stat=,comm= | awk '$1 !~ /^Z/ && $2 == "dockerd"' | wc -l; }
zombies() { ps -eo stat=,comm= | awk '$1 ~ /^Z/ && $2 ~ /^dockerd/' | wc -l; }
"""


_PID_1 = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"


def in_own_machine(script: str) -> str:
    done = subprocess.run(
        [
            "unshare", "--mount", "--pid", "--fork", "--net", "--ipc", "--kill-child",
            sys.executable, "-c", _PID_1, "bash", "-c", _PRELUDE + script, "machine", str(SCRIPT),
        ],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_starts_one_engine_and_leaves_a_running_one_alone() -> None:
    out = in_own_machine("""
        ! "$1" --check
        "$1" & "$1"; wait
        echo "alive $(alive)"
        "$1"
        echo "alive $(alive)"
        cat /proc/sys/net/ipv4/ip_forward
        iptables -S FORWARD
        ip -o link | grep -c docker0 || true
    """)
    lines = out.splitlines()
    assert lines[0] == "docker engine: none answers"
    assert sum("started" in line for line in lines) == 1
    assert lines.count("alive 1") == 2
    assert lines[-3:] == ["0", "-P FORWARD ACCEPT", "0"], "the machine's routing was changed"


def test_it_comes_back_after_an_engine_was_killed_and_stayed_a_zombie() -> None:
    out = in_own_machine("""
        "$1"
        kill -9 "$(cat /run/docker.pid)"
        for _ in $(seq 600); do [ "$(zombies)" = 1 ] && break; sleep 0.1; done
        echo "zombies $(zombies)"
        test -e /run/docker.pid
        "$1"
        echo "alive $(alive)"
    """)
    assert "zombies 1" in out, "the test machine's PID 1 reaped: nothing was tested"
    assert out.count("started") == 2
    assert out.splitlines()[-1] == "alive 1"


def test_it_says_when_another_engine_was_asked_for() -> None:
    out = in_own_machine("""
        DOCKER_HOST=unix:///run/other.sock "$1" 2>&1 || echo "code $?"
        echo "alive $(alive)"
    """)
    assert "DOCKER_HOST" in out
    assert out.splitlines()[-2:] == ["code 1", "alive 0"]
