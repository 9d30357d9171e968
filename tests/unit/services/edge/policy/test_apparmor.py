"""Profiles: what they say, and that AppArmor's own parser takes them where it is there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from services.edge.policy.apparmor import profile, quoted, rule_of
from shared import policies
from shared.errors import InvalidRequest

POLICY = policies.read(
    {
        "files": {"read_only": ["/usr", "/my tools"], "hidden": ["/opt/a#b"],
                  "protected": ["/opt/[x].py"]},
        "processes": {"deny": ["mount", "ptrace", "raw_sockets", "bpf", "exec:/usr/bin/nc"]},
    },
    {},
)  # fmt: skip


def test_every_denial_is_told() -> None:
    lines = profile("dsec-a", POLICY).splitlines()
    denials = [line.strip() for line in lines if " deny " in line]
    assert denials and all(line.startswith("audit deny ") for line in denials)
    assert "audit deny /usr/** wl," in denials
    assert 'audit deny "/my tools/**" wl,' in denials


def test_paths_are_taken_literally() -> None:
    assert quoted("/a*b[c]") == r"/a\*b\[c\]"
    assert quoted('/a "b"').startswith('"')


def test_who_stops_a_sandbox_may_signal_it() -> None:
    """(S12)"""
    text = profile("dsec-a", POLICY)
    for peer in ("unconfined", "docker-default", "runc", "dsec-a"):
        assert f"peer={peer}," in text
    assert "deny signal" not in text


def test_a_name_cannot_carry_rules() -> None:
    for name in ("", "a b", "a{", "a\nb", "../x"):
        with pytest.raises(InvalidRequest):
            profile(name, POLICY)


@pytest.mark.parametrize(
    ("operation", "path", "rule"),
    [
        ("open", "/usr/bin/x", "files.read_only"), ("open", "/usrx", "processes.open"),
        ("open", "/opt/a#b", "files.hidden"), ("unlink", "/opt/[x].py", "files.protected"),
        ("mount", "/mnt/", "processes.mount"), ("pivotroot", "", "processes.mount"),
        ("ptrace", "", "processes.ptrace"), ("create", "", "processes.raw_sockets"),
        ("exec", "/usr/bin/nc", "processes.exec"),
    ],
)  # fmt: skip
def test_a_denial_is_of_the_rule_that_asked_for_it(operation: str, path: str, rule: str) -> None:
    assert rule_of(POLICY, operation, path) == rule


@pytest.mark.skipif(shutil.which("apparmor_parser") is None, reason="no apparmor_parser here")
def test_the_parser_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "profile"
    file.write_text(profile("dsec-a", POLICY))
    done = subprocess.run(["apparmor_parser", "-QK", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
