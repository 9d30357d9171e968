"""Connections that the kernel's programs turn to the gate: each is known there by where it was
to go, in its own network namespace alone."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.edge.drivers.container.settings import GUEST_BUILD
from services.edge.egress.kernelmaps import ORIGINS, Kernel
from services.edge.egress.namespaces import Inside, open_inside, within
from services.edge.policy.reach import Reach
from shared import policies
from shared.errors import DsecError
from shared.ids import new

UNIFIED = Path("/sys/fs/cgroup/unified")
HOST, HOST6, PORT = "198.51.100.7", "2001:db8::7", 8080
RULES = {f"{HOST}:{PORT}": True, f"[{HOST6}]:{PORT}": True}
CONNECT = """
import socket, sys
for host in sys.argv[2:]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        try:
            sock.connect((host, int(sys.argv[1])))
            print("ok")
        except OSError as err:
            print(err.strerror)
"""


@dataclass
class Place:
    """A namespace with a gate, and a process in it."""

    pid: int
    inside: Inside

    def accept(self, index: int = 0) -> int:
        """The mark of the next connection."""
        self.inside.tcp[index].setblocking(True)
        self.inside.tcp[index].settimeout(60)
        sock, _ = self.inside.tcp[index].accept()
        with sock:
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    try:
        made = Kernel(GUEST_BUILD / "bpf" / "egress.o")
    except DsecError as err:
        pytest.skip(err.message)
    yield made
    made.close()


@pytest.fixture
def group() -> Iterator[Path]:
    root = UNIFIED if UNIFIED.is_dir() else UNIFIED.parent
    made = root / f"dsec-test-{new().lower()}"
    made.mkdir()
    yield made
    made.rmdir()


@pytest.fixture
def places(kernel: Kernel, group: Path) -> Iterator[list[Place]]:
    """Two that are allowed the same."""
    kernel.watch(group)
    holders = [
        subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up; echo up; exec sleep 600"],
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    made = []
    for holder in holders:
        assert holder.stdout is not None and holder.stdout.readline()
        inside = open_inside(holder.pid, "")
        rules = kernel.policy({})
        rules.put(Reach(policies.read(None, RULES).network, {}).entries)
        kernel.register(inside.cookie)
        kernel.enforce(inside.cookie, rules)
        made.append(Place(holder.pid, inside))
    yield made
    for place, holder in zip(made, holders, strict=True):
        place.inside.close()
        holder.kill()
        holder.wait()


def connect(place: Place, group: Path, *hosts: str, port: int = PORT) -> list[str]:
    joined = f'echo $$ >{group}/cgroup.procs; exec python3 -c "$@"'
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{place.pid}/ns/net", "sh", "-c", joined, "sh", CONNECT,
         str(port), *hosts],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_a_connection_is_known_by_where_it_was_to_go(
    kernel: Kernel, group: Path, places: list[Place]
) -> None:
    one, other = places
    assert connect(one, group, HOST, f"::ffff:{HOST}", HOST6) == ["ok"] * 3
    marks = [one.accept(), one.accept(), one.accept(index=1)]
    assert len(set(marks)) == 3
    for mark, host in zip(marks, (HOST, HOST, HOST6), strict=True):
        found = kernel.origin(one.inside.cookie, mark)
        assert found is not None and (str(found[0]), found[1]) == (host, PORT)
        assert kernel.origin(other.inside.cookie, mark) is None, "it is another sandbox's"
        assert kernel.origin(one.inside.cookie, mark + ORIGINS) is None, "the place has another"


def test_what_was_not_turned_has_no_origin(
    kernel: Kernel, group: Path, places: list[Place]
) -> None:
    """A process elsewhere in the namespace, whose calls no program sees."""
    (one, _) = places
    gate = one.inside.tcp[0].getsockname()
    with within(Path(f"/proc/{one.pid}/ns/net"), lambda: socket.create_connection(gate)):
        assert kernel.origin(one.inside.cookie, one.accept()) is None
    assert connect(one, group, gate[0], port=gate[1]) == ["Operation not permitted"]
    assert kernel.denied(one.inside.cookie) == 1


def test_without_a_policy_nothing_is_turned(
    kernel: Kernel, group: Path, places: list[Place]
) -> None:
    one, other = places
    kernel.drop_policy(one.inside.cookie)
    assert connect(one, group, HOST) == ["Operation not permitted"]
    assert connect(other, group, HOST) == ["ok"]
    assert (kernel.denied(one.inside.cookie), kernel.denied(other.inside.cookie)) == (1, 0)
