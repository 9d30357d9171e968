"""Arguments of what was executed, as the kernel hands them over."""

from __future__ import annotations

import pytest

from services.edge.sensors.execs import argv_of


@pytest.mark.parametrize(
    ("name", "arguments", "argv"),
    [
        (b"git", b"git\0log\0--all\0", ["git", "log", "--all"]),
        (b"git", b"other\0log\0", ["git", "log"]),  # it was told another name
        (b"pip", b"/usr/bin/python3\0/usr/bin/pip\0download\0x\0", ["pip", "download", "x"]),
        (b"npm", b"/usr/bin/env\0node\0/usr/bin/npm\0view\0x\0", ["npm", "view", "x"]),
        (b"git", b"git\0commit\0-m\0git\0", ["git", "commit", "-m", "git"]),
        (b"git", b"git\0log\0--al", ["git", "log", "--al"]),  # cut
        (b"git", b"git\0log\0\0x\0", ["git", "log", "", "x"]),
        (b"git", b"", ["git"]), (b"git", b"\xff\0a\0", ["git", "a"]),
    ],
)  # fmt: skip
def test_a_program_is_called_by_its_name(name: bytes, arguments: bytes, argv: list[str]) -> None:
    assert argv_of(name.ljust(16, b"\0"), arguments) == argv
