"""Filters of system calls, run by an interpreter of the kernel's language."""

from __future__ import annotations

import struct

import pytest

from services.edge.policy import seccomp
from services.edge.policy.seccomp import (
    ARCHES,
    CLONE_NEWUSER,
    ENOSYS,
    EPERM,
    FS_IOCTLS,
    NUMBERS,
    RET_ALLOW,
    RET_ERRNO,
    RET_NOTIFY,
)  # fmt: skip
from shared import policies
from shared.policies.model import DENIABLE

DENIED = RET_ERRNO | EPERM


def judged(code: bytes, machine: str, call: str | int, *args: int, arch: int = 0) -> int:
    """The verdict of a filter on a call."""
    number = NUMBERS[machine][call] if isinstance(call, str) else call
    args = (*args, *(0,) * (6 - len(args)))
    data = struct.pack("<iIQ6Q", number, arch or ARCHES[machine], 0, *args)
    program = list(struct.iter_unpack("<HBBI", code))
    at, acc = 0, 0
    while True:
        op, yes, no, k = program[at]
        at += 1
        if op == seccomp.LD_W_ABS:
            acc = int.from_bytes(data[k : k + 4], "little")
        elif op == seccomp.ALU_AND_K:
            acc &= k
        elif op == seccomp.JEQ_K:
            at += yes if acc == k else no
        elif op == seccomp.JSET_K:
            at += yes if acc & k else no
        else:
            assert op == seccomp.RET_K
            return k


def program(*deny: str, notify: bool = False, machine: str = "x86_64") -> bytes:
    policy = policies.read({"processes": {"deny": list(deny)}}, {})
    return seccomp.program(policy, machine, notify=notify)


@pytest.mark.parametrize("machine", NUMBERS)
def test_denied_calls_fail_and_others_pass(machine: str) -> None:
    code = program(*DENIABLE, machine=machine)
    for call in ("ptrace", "mount", "move_mount", "bpf", "io_uring_setup", "userfaultfd", "keyctl"):
        assert judged(code, machine, call) == DENIED, call
    for call, *args in (("clone", 0x11), ("socket", 2, 1), ("ioctl", 1, 0x5401), (0, 0)):
        assert judged(code, machine, call, *args) == RET_ALLOW, call


@pytest.mark.parametrize("machine", NUMBERS)
def test_a_request_is_compared_as_the_kernel_reads_it(machine: str) -> None:
    code = program("fs_ioctl", machine=machine)
    for request in FS_IOCTLS.values():
        assert judged(code, machine, "ioctl", 3, request) == DENIED
        assert judged(code, machine, "ioctl", 3, request | 1 << 32) == DENIED


@pytest.mark.parametrize("machine", NUMBERS)
@pytest.mark.parametrize("deny", [[], ["ptrace"], ["fs_ioctl", "ioctl:0x5401"]])
def test_files_stay_in_their_project_whatever_the_policy(machine: str, deny: list[str]) -> None:
    """(S12) Where a quota counts them for it."""
    policy = policies.read({"processes": {"deny": deny}}, {})
    for notify in (False, True):
        code = seccomp.program(policy, machine, notify=notify, projects=True)
        denied = RET_NOTIFY if notify else DENIED
        for name in seccomp.PROJECT_IOCTLS:
            assert judged(code, machine, "ioctl", 3, FS_IOCTLS[name] | 1 << 32) == denied
        assert judged(code, machine, "file_setattr") == denied
        assert judged(code, machine, "ioctl", 1, 0x5402) == RET_ALLOW
    plain = seccomp.program(policy, machine, notify=False)
    expected = DENIED if "fs_ioctl" in deny else RET_ALLOW
    assert judged(plain, machine, "file_setattr") == expected


def test_namespaces_of_users_are_denied_by_every_call() -> None:
    code = program("userns")
    assert judged(code, "x86_64", "clone", CLONE_NEWUSER | 17) == DENIED
    assert judged(code, "x86_64", "unshare", CLONE_NEWUSER) == DENIED
    assert judged(code, "x86_64", "unshare", 0x20000) == RET_ALLOW
    assert judged(code, "x86_64", "clone3") == RET_ERRNO | ENOSYS


def test_raw_sockets_are_denied_whatever_flags_they_come_with() -> None:
    code = program("raw_sockets")
    assert judged(code, "x86_64", "socket", 2, 3 | 0x80000, 1) == DENIED
    assert judged(code, "x86_64", "socket", 17, 2, 0) == DENIED
    assert judged(code, "x86_64", "socket", 40, 1, 0) == DENIED
    assert judged(code, "x86_64", "socket", 10, 1 | 0x800, 6) == RET_ALLOW


def test_other_ways_to_number_calls_are_closed() -> None:
    code = program("ptrace")
    assert judged(code, "x86_64", 0, arch=0x40000003) == DENIED
    assert judged(code, "x86_64", 0x40000000 | 521) == RET_ERRNO | ENOSYS


def test_the_asking_form_differs_in_nothing_but_the_verdict() -> None:
    plain, asks = program(*DENIABLE), program(*DENIABLE, notify=True)
    assert len(plain) == len(asks)
    assert judged(asks, "x86_64", "ptrace") == RET_NOTIFY
    assert judged(asks, "x86_64", 1) == RET_ALLOW


def test_as_many_ioctls_as_a_policy_may_name_fit_a_jump() -> None:
    names = [f"ioctl:{n:#x}" for n in range(1, 65)]
    code = program("fs_ioctl", *names)
    assert judged(code, "x86_64", "ioctl", 0, 64) == DENIED
    assert judged(code, "x86_64", "ioctl", 0, 65) == RET_ALLOW


def test_a_denied_call_has_a_name_and_a_rule() -> None:
    number = NUMBERS["x86_64"]
    swap = (3, FS_IOCTLS["XFS_IOC_SWAPEXT"] | 1 << 32)
    assert seccomp.describe("x86_64", number["ioctl"], swap) == (
        "ioctl XFS_IOC_SWAPEXT", "processes.fs_ioctl",
    )  # fmt: skip
    assert seccomp.describe("x86_64", number["ptrace"], ()) == ("ptrace", "processes.ptrace")
    assert seccomp.describe("x86_64", number["socket"], (17,))[1] == "processes.raw_sockets"
