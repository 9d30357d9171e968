"""Which limits are possible, and what bounds them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from services.edge.disks import quotas
from services.edge.disks.plan import (
    GROUP_BYTES,
    INODES_STEP,
    MIB,
    Found,
    Room,
    choose,
    image_bytes,
    image_inodes,
    room_for,
    use_of,
)
from shared.errors import InvalidRequest, Unavailable

YES, NO = Found(True), Found(False, "no way")


def test_no_limit_is_no_disk() -> None:
    assert room_for(None, None) is None


@pytest.mark.parametrize(
    ("disk_mb", "inodes", "field"),
    [
        (0, None, "disk_limit_mb"), (7, None, "disk_limit_mb"),
        (None, 1000, "policy.resources.inodes"), (64, 16, "policy.resources.inodes"),
        (10_240, 1000, "policy.resources.inodes"),
    ],
)  # fmt: skip
def test_an_impossible_limit_is_named(
    disk_mb: int | None, inodes: int | None, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        room_for(disk_mb, inodes)
    assert caught.value.field == field


def test_files_are_always_bounded() -> None:
    assert room_for(8, None) == Room(8, 1024)
    assert room_for(1024, None) == Room(1024, 131_072)
    assert room_for(64, 1000) == Room(64, 1000)


@pytest.mark.parametrize("disk_mb", [8, 64, 127, 1024, 100_000, 16_777_216])
def test_an_image_has_room_for_what_it_promises_and_its_tables(disk_mb: int) -> None:
    room = room_for(disk_mb, None)
    assert room is not None
    size, groups = image_bytes(room), -(-disk_mb * MIB // GROUP_BYTES)
    least = disk_mb * MIB + image_inodes(room) * 256
    assert least < size < least * 1.05 + 2 * MIB
    assert size % 4096 == 0
    assert image_inodes(room) // groups >= INODES_STEP


@pytest.mark.parametrize(
    ("wanted", "quota", "image", "chosen"),
    [
        ("auto", YES, YES, "quota"), ("auto", NO, YES, "image"), ("auto", NO, NO, None),
        ("image", YES, YES, "image"), ("quota", NO, YES, None), ("none", YES, YES, None),
    ],
)  # fmt: skip
def test_the_cheapest_mechanism_that_works_is_used(
    wanted: str, quota: Found, image: Found, chosen: str | None
) -> None:
    mechanism, reason = choose(wanted, quota=quota, image=image)
    assert mechanism == chosen
    assert bool(reason) == (chosen is None)


def test_an_unknown_choice_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        choose("imgae", quota=YES, image=YES)
    assert caught.value.field == "disks"


def test_full_is_hardly_any_room_or_no_inode() -> None:
    numbers = {"blocks": 1000, "free": 500, "available": 480, "unit": 4096, "inodes_free": 10}
    assert use_of(**numbers).used_bytes == 500 * 4096
    assert not use_of(**numbers).full
    assert use_of(**{**numbers, "available": 20}).full
    assert use_of(**{**numbers, "inodes_free": 0}).full


class Kernel:
    """Project quotas by the book: what was asked for, in order."""

    def __init__(self, *, flags: int = quotas.ENFORCED) -> None:
        self.flags, self.limits = flags, dict[int, bytes]()
        self.taken_first = 0

    def __call__(self, _fd: int, command: int, project: int, data: bytearray) -> None:
        if command == quotas.GET_STATE:
            data[:] = quotas.STATE.pack(self.flags)
        elif command == quotas.SET_LIMITS:
            self.limits[project] = bytes(data)
        elif self.taken_first > 0:
            self.taken_first -= 1
            data[:] = quotas.LIMITS.pack(1, 2, 0, project, 100, 0, 0, 0, 7, 1)
        else:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))


@pytest.mark.parametrize(
    ("flags", "works"), [(0, False), (1 << 4, False), (1 << 4 | 1 << 5, True), (0x3F, True)]
)
def test_quotas_are_used_where_they_are_held_to(flags: int, works: bool) -> None:
    found = quotas.judge_state(quotas.STATE.pack(flags))
    assert found.works == works
    assert works or "prjquota" in found.reason


def test_the_kernels_structures_have_the_kernels_sizes() -> None:
    assert (quotas.STATE.size, quotas.LIMITS.size, quotas._XATTR.size) == (80, 112, 28)


def test_a_limit_is_a_hard_one_in_blocks_of_512_bytes() -> None:
    packed = quotas.limits_of(0x4000_0001, Room(64, 1000))
    version, flags, fields, project, blocks, soft, inodes, *_ = quotas.LIMITS.unpack(packed)
    assert (version, flags, project, soft) == (1, 2, 0x4000_0001, 0)
    assert (blocks * 512, inodes, fields) == (64 * MIB, 1000, 2 | 8)
    assert not any(quotas.LIMITS.unpack(quotas.limits_of(1, None))[4:])


def test_a_project_in_use_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[int] = []
    monkeypatch.setattr(quotas, "_mark", lambda _fd, project: marked.append(project))
    monkeypatch.setattr(quotas, "_marked", lambda _fd: marked[-1])
    kernel = Kernel()
    kernel.taken_first = 3
    made = quotas.Quotas(tmp_path, kernel)
    project = made.make(tmp_path, Room(64, 1000))
    assert quotas.FIRST <= project <= quotas.LAST
    assert marked == [project]
    assert list(kernel.limits) == [project]
    made.drop(tmp_path)
    assert not any(quotas.LIMITS.unpack(kernel.limits[project])[4:])
    kernel.taken_first = 1000
    with pytest.raises(Unavailable):
        made.make(tmp_path, Room(64, 1000))


def test_another_file_system_has_none(tmp_path: Path) -> None:
    found = quotas.Quotas(tmp_path, Kernel()).probe()
    assert not found.works and "XFS" in found.reason


@pytest.mark.parametrize("project", [0, 42, quotas.FIRST - 1, quotas.LAST + 1])
def test_projects_of_others_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: int
) -> None:
    monkeypatch.setattr(quotas, "_marked", lambda _fd: project)
    kernel = Kernel()
    quotas.Quotas(tmp_path, kernel).drop(tmp_path)
    assert not kernel.limits
