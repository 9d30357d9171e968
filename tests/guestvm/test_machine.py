"""Boots the machine; every test of ``inside`` passes there, or this fails with what it said."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.guestvm.image import machine
from tests.security.redteam.conftest import compile_attempt

REPOSITORY = Path(__file__).resolve().parents[2]
BOOT_TIMEOUT_S = 1500
INSIDE = os.environ.get("DSEC_GUEST_TESTS", "tests/guestvm/inside")
"""What pytest is told there, to run less than all."""
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet root=/dev/vda rw init=/dsec-init panic=-1 apparmor=1 "
    "lsm=landlock,lockdown,yama,apparmor,bpf mitigations=off systemd.unified_cgroup_hierarchy=0"
)


def share(tag: str, path: Path | str, *, writable: bool = False) -> list[str]:
    options = f"local,path={path},mount_tag={tag},security_model=none"
    return ["-virtfs", options + ("" if writable else ",readonly=on")]


@pytest.mark.timeout(BOOT_TIMEOUT_S + 1500)
def test_everything_holds_on_debians_own_kernel(tmp_path: Path) -> None:
    made = machine()
    (tmp_path / "arguments").write_text(INSIDE)
    compile_attempt(tmp_path)
    argv = [
        "qemu-system-x86_64", "-accel", "tcg", "-machine", "q35", "-cpu", "max", "-smp", "2",
        "-m", "3072", "-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio", "-net", "none",
        "-kernel", str(made.kernel), "-initrd", str(made.ramdisk), "-append", KERNEL_ARGUMENTS,
        "-drive", f"file={made.disk},if=virtio,format=raw,snapshot=on",
        *share("repository", REPOSITORY), *share("site", sysconfig.get_path("purelib")),
        *share("out", tmp_path, writable=True),
    ]  # fmt: skip
    booted = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=BOOT_TIMEOUT_S, check=False
    )
    said = {file.name: file.read_text(errors="replace") for file in tmp_path.glob("*.log")}
    console = booted.stdout[-4000:].decode(errors="replace")
    status = tmp_path / "status"
    assert status.exists(), f"it did not come to an end:\n{console}\n{said}"
    print(said.get("tests.log", ""))
    assert status.read_text().strip() == "0", f"{said.get('tests.log')}\n{console}"
