"""Denied system calls as a classic BPF program. Pure.

Owns: which calls a denial is about and the filter over them. Does not own: putting it on
a process (the guest agent does, right before it executes a command). Requests of ``ioctl``
are compared in their low 32 bits, as the kernel reads them: comparing the whole register
is passed by setting a higher bit. Calls of another architecture are refused as a whole;
``clone3``, whose flags a filter cannot read, is said not to exist, so that C libraries
fall back to ``clone``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shared.policies import Policy

LD_W_ABS, ALU_AND_K, JEQ_K, JSET_K, RET_K = 0x20, 0x54, 0x15, 0x45, 0x06
RET_ALLOW, RET_ERRNO, RET_NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
EPERM, ENOSYS = 1, 38
AT_NR, AT_ARCH, AT_ARGS = 0, 4, 16
X32_BIT = 0x40000000
CLONE_NEWUSER = 0x10000000
SOCK_TYPE_MASK, SOCK_RAW = 0xF, 3
AF_VSOCK, AF_PACKET, AF_ALG = 40, 17, 38

ARCHES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_X86: Mapping[str, int] = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "clone": 56, "unshare": 272, "clone3": 435, "mount": 165, "umount2": 166, "pivot_root": 155,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "mount_setattr": 442, "bpf": 321, "perf_event_open": 298,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "userfaultfd": 323,
    "add_key": 248, "request_key": 249, "keyctl": 250, "socket": 41, "socketpair": 53,
    "ioctl": 16, "pidfd_getfd": 438, "file_setattr": 469,
}  # fmt: skip
_ARM: Mapping[str, int] = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "clone": 220, "unshare": 97, "clone3": 435, "mount": 40, "umount2": 39, "pivot_root": 41,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "mount_setattr": 442, "bpf": 280, "perf_event_open": 241,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "userfaultfd": 282,
    "add_key": 217, "request_key": 218, "keyctl": 219, "socket": 198, "socketpair": 199,
    "ioctl": 29, "pidfd_getfd": 438, "file_setattr": 469,
}  # fmt: skip
NUMBERS: Mapping[str, Mapping[str, int]] = {"x86_64": _X86, "aarch64": _ARM}

_WHOLE: Mapping[str, Sequence[str]] = {
    "ptrace": ("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"),
    "mount": (
        "mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig",
        "fsmount", "fspick", "mount_setattr",
    ),
    "bpf": ("bpf", "perf_event_open"),
    "io_uring": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
    "userfaultfd": ("userfaultfd",),
    "keyring": ("add_key", "request_key", "keyctl"), "fs_ioctl": ("file_setattr",),
}  # fmt: skip
FS_IOCTLS: Mapping[str, int] = {
    "XFS_IOC_SWAPEXT": 0xC0C0586D, "XFS_IOC_EXCHANGE_RANGE": 0x40285881,
    "XFS_IOC_START_COMMIT": 0x80585882, "XFS_IOC_COMMIT_RANGE": 0x40585883,
    "XFS_IOC_GOINGDOWN": 0x8004587D, "EXT4_IOC_MOVE_EXT": 0xC028660F,
    "FIFREEZE": 0xC0045877, "FITHAW": 0xC0045878,
    "FS_IOC_SETFLAGS": 0x40086602, "FS_IOC_FSSETXATTR": 0x401C5820,
}  # fmt: skip
PROJECT_IOCTLS = ("FS_IOC_SETFLAGS", "FS_IOC_FSSETXATTR")
"""With ``file_setattr``: what takes a file out of the project that a quota counts it for."""


@dataclass(frozen=True, slots=True)
class _Test:
    """One denied call: ``value`` of argument ``arg`` under ``mask``; all calls without."""

    call: str
    arg: int | None = None
    mask: int = 0xFFFFFFFF
    value: int = 0
    any_bit: bool = False


def _tests(policy: Policy, *, projects: bool = False) -> Iterable[_Test]:
    if projects and "fs_ioctl" not in policy.deny:
        yield _Test("file_setattr")
        for name in PROJECT_IOCTLS:
            yield _Test("ioctl", 1, value=FS_IOCTLS[name])
    for name in policy.deny:
        for call in _WHOLE.get(name, ()):
            yield _Test(call)
    if "userns" in policy.deny:
        yield _Test("clone", 0, value=CLONE_NEWUSER, any_bit=True)
        yield _Test("unshare", 0, value=CLONE_NEWUSER, any_bit=True)
    if "raw_sockets" in policy.deny:
        for call in ("socket", "socketpair"):
            for family in (AF_PACKET, AF_VSOCK, AF_ALG):
                yield _Test(call, 0, value=family)
            yield _Test(call, 1, mask=SOCK_TYPE_MASK, value=SOCK_RAW)
    ioctls = [*(FS_IOCTLS.values() if "fs_ioctl" in policy.deny else ()), *policy.ioctls]
    for number in dict.fromkeys(ioctls):
        yield _Test("ioctl", 1, value=number)


def filters(policy: Policy) -> bool:
    """Whether it denies any call."""
    return any(True for _ in _tests(policy))


@lru_cache(maxsize=64)
def program(policy: Policy, machine: str, *, notify: bool, projects: bool = False) -> bytes:
    """The filter for ``machine`` (``x86_64``, ``aarch64``): an array of ``struct
    sock_filter``. With ``notify`` a denied call asks the filter's listener, else it
    fails with ``EPERM``. ``projects``: files stay in the project that a quota counts them
    for, whatever the policy. Raises ``KeyError`` for another machine."""
    numbers = NUMBERS[machine]
    denied = RET_NOTIFY if notify else RET_ERRNO | EPERM
    code = [_load(AT_ARCH), _jump(JEQ_K, ARCHES[machine], 1, 0), _ret(RET_ERRNO | EPERM)]
    code.append(_load(AT_NR))
    if machine == "x86_64":
        code += [_jump(JSET_K, X32_BIT, 0, 1), _ret(RET_ERRNO | ENOSYS)]
    if "userns" in policy.deny:
        code += [_jump(JEQ_K, numbers["clone3"], 0, 1), _ret(RET_ERRNO | ENOSYS)]
    by_call: dict[str, list[_Test]] = {}
    for test in _tests(policy, projects=projects):
        by_call.setdefault(test.call, []).append(test)
    for call, tests in by_call.items():
        body = _body(tests, denied)
        code += [_jump(JEQ_K, numbers[call], 0, len(body)), *body]
    code.append(_ret(RET_ALLOW))
    return b"".join(code)


def _body(tests: list[_Test], denied: int) -> list[bytes]:
    """What is done for one call: it ends in a verdict, so nothing needs the call's number
    again. A jump reaches 255 instructions, 3 a test."""
    if any(test.arg is None for test in tests):
        return [_ret(denied)]
    body: list[bytes] = []
    for test in tests:
        assert test.arg is not None
        body.append(_load(AT_ARGS + 8 * test.arg))  # the low half: both machines are little-endian
        if test.mask != 0xFFFFFFFF:
            body.append(_op(ALU_AND_K, test.mask))
        body += [_jump(JSET_K if test.any_bit else JEQ_K, test.value, 0, 1), _ret(denied)]
    body.append(_ret(RET_ALLOW))
    return body


def _op(code: int, k: int) -> bytes:
    return struct.pack("<HBBI", code, 0, 0, k)


def _load(at: int) -> bytes:
    return _op(LD_W_ABS, at)


def _ret(value: int) -> bytes:
    return _op(RET_K, value)


def _jump(code: int, k: int, yes: int, no: int) -> bytes:
    return struct.pack("<HBBI", code, yes, no, k)


def describe(machine: str, number: int, args: Sequence[int]) -> tuple[str, str]:
    """The name of a denied call and the rule it met."""
    names = {value: name for name, value in NUMBERS[machine].items()}
    call = names.get(number, str(number))
    if call == "ioctl":
        request = args[1] & 0xFFFFFFFF
        known = {value: name for name, value in FS_IOCTLS.items()}
        rule = "fs_ioctl" if request in known else f"ioctl:{request:#x}"
        return f"ioctl {known.get(request, hex(request))}", f"processes.{rule}"
    if call in ("socket", "socketpair"):
        return call, "processes.raw_sockets"
    if call in ("clone", "unshare"):
        return call, "processes.userns"
    rule = next((name for name, calls in _WHOLE.items() if call in calls), call)
    return call, f"processes.{rule}"
