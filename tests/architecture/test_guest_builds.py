"""What runs inside sandboxes builds for every machine that nodes have, without warnings,
and needs nothing where it runs."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

GUEST = Path(__file__).parents[2] / "guest"
MACHINES = {"x86_64": 62, "aarch64": 183}
PT_INTERP = 3
STRICT = "-O2 -Werror"


def headers(elf: bytes) -> set[int]:
    """The types of an ELF file's program headers."""
    (at,), (size, count) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    return {struct.unpack_from("<I", elf, at + i * size)[0] for i in range(count)}


@pytest.mark.parametrize("arch", MACHINES)
def test_every_binary_builds_static_and_without_warnings(arch: str, tmp_path: Path) -> None:
    argv = ["make", "-C", GUEST, f"ARCH={arch}", f"BUILD={tmp_path}", f"CFLAGS={STRICT}"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    binaries = [p for p in tmp_path.iterdir() if p.is_file()]
    assert {"aether", "attach"} <= {p.name for p in binaries}
    for binary in binaries:
        elf = binary.read_bytes()
        assert elf[:5] == b"\x7fELF\x02"
        assert struct.unpack_from("<H", elf, 18)[0] == MACHINES[arch], binary.name
        assert PT_INTERP not in headers(elf), f"{binary.name} needs a loader"
    if arch == "aarch64":
        runs_elsewhere(tmp_path / "aether")


def runs_elsewhere(aether: Path) -> None:
    """Where the machine can: it starts, and says how it is called."""
    if (qemu := shutil.which("qemu-aarch64-static")) is not None:
        done = subprocess.run([qemu, aether], capture_output=True, text=True, timeout=60)
        assert done.returncode == 70
        assert "usage: aether" in done.stderr


def test_no_source_is_written_for_one_machine() -> None:
    """System calls go by name, and nothing is in assembler."""
    bad = re.compile(r"syscall\(\s*\d|__NR_|\b__?asm__?\b|__x86_64__|__i386__")
    found = [
        f"{path.relative_to(GUEST)}: {line.strip()}"
        for path in GUEST.glob("*/*.[ch]")
        for line in path.read_text().splitlines()
        if bad.search(line)
    ]
    assert not found
