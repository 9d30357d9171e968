"""Residue: what each rule takes out of a tree, and what it leaves."""

from __future__ import annotations

import stat

import pytest

from services.edge.snapshots import scrub
from services.edge.snapshots.scrub import RULES, Rule
from shared.erofs.layertree import Inode, new_dir, new_whiteout, walk
from shared.errors import InvalidRequest


def tree(*paths: str) -> Inode:
    root = new_dir()
    for path in paths:
        at = root
        *folders, name = path.strip("/").encode().split(b"/")
        for folder in folders:
            at = at.children.setdefault(folder, new_dir())
        at.children[name] = new_dir() if path.endswith("/") else Inode(stat.S_IFREG | 0o644)
    return root


def names(root: Inode) -> set[str]:
    return {"/" + path.decode() for path, inode in walk(root) if path and not inode.children}


RESIDUE = {
    "history": ["/root/.bash_history", "/home/a/b/.python_history", "/.viminfo"],
    "credentials": [
        "/root/.netrc", "/home/agent/.ssh/id_ed25519", "/root/.aws/credentials",
        "/root/.config/gh/hosts.yml", "/srv/x/.git-credentials", "/etc/ssh/ssh_host_rsa_key",
    ],
    "temporary": ["/tmp/x", "/tmp/deep/er", "/var/tmp/y", "/run/lock/z"],
    "cache": [
        "/root/.cache/pip/x", "/home/a/.cache/y", "/var/lib/apt/lists/z",
        "/workspace/pkg/__pycache__/m.pyc", "/workspace/.pytest_cache/v/x",
    ],
    "log": ["/var/log/syslog", "/var/log/apt/term.log"],
    "identity": ["/etc/machine-id"],
}  # fmt: skip


@pytest.mark.parametrize("rule", RESIDUE)
def test_each_rule_takes_what_it_names(rule: str) -> None:
    """(S11) And says so."""
    kept = ["/workspace/code.py", "/etc/passwd", "/root/notes"]
    root = tree(*RESIDUE[rule], *kept)
    report = scrub.scrub(root, RULES)
    assert names(root) & set(RESIDUE[rule]) == set()
    assert names(root) >= set(kept)
    assert {one.rule for one in report.removed} == {rule}
    assert report.count == len(report.removed) > 0


def test_whiteouts_and_lookalikes_stay() -> None:
    root = tree("/tmp/", "/root/my.netrc", "/data/tmp/x", "/home/log/y", "/srv/id_rsa")
    root.children[b"tmp"].children[b"hidden"] = new_whiteout()
    before = names(root)
    assert scrub.scrub(root, RULES).count == 0
    assert names(root) == before
    assert b"tmp" in root.children


def test_patterns_match_within_a_name_or_over_many() -> None:
    root = tree("/a/k1", "/a/b/k2", "/a/b/c/k3", "/k4", "/a/other")
    assert scrub.scrub(root, scrub.extra(["/a/*"])).count == 3
    root = tree("/a/k1", "/a/b/k2", "/a/b/c/k3", "/k4", "/a/other")
    report = scrub.scrub(root, scrub.extra(["/a/**/k*"]))
    assert {one.path for one in report.removed} == {"/a/k1", "/a/b/k2", "/a/b/c/k3"}
    assert names(root) >= {"/k4", "/a/other"}


@pytest.mark.parametrize("pattern", ["relative", "/a/../b", "/a//b", "/a/./b", ""])
def test_patterns_are_absolute_paths(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        scrub.extra([pattern])
    assert refused.value.field == "remove"


def test_a_report_names_the_first_and_counts_all() -> None:
    root = tree(*(f"/tmp/{number}" for number in range(scrub.REPORTED_MAX + 5)))
    report = scrub.scrub(root, [Rule("temporary", ("/tmp",), content=True)])
    assert (len(report.removed), report.count) == (scrub.REPORTED_MAX, scrub.REPORTED_MAX + 5)


def test_any_number_of_folders_is_looked_for_in_one_walk() -> None:
    """A deep tree and a pattern of many ``**`` cost what a short one does."""
    steps = 0

    def tick(_done: int) -> None:
        nonlocal steps
        steps += 1

    folders = "/a" * 60
    root = tree(*(f"{folders[: 2 * depth]}/k{depth}" for depth in range(60)))
    report = scrub.scrub(root, scrub.extra(["/" + "**/" * 200 + "k5?"]), tick=tick)
    gone = {one.path.rpartition("/")[2] for one in report.removed}
    assert gone == {f"k{number}" for number in range(50, 60)}
    assert steps == 119
    scrub.scrub(root, scrub.extra(["/**/a/**/a/**/none"]), tick=tick)
    assert steps == 119 + 109


def test_a_pattern_has_few_parts_of_any_names() -> None:
    with pytest.raises(InvalidRequest) as refused:
        scrub.extra(["/**/a/**/b/**/c/**/d"])
    assert refused.value.field == "remove"


def test_a_scrub_ends_when_its_caller_does() -> None:
    def tick(_done: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        scrub.scrub(tree("/a/b"), RULES, tick=tick)


def test_any_names_at_the_end_are_what_is_below() -> None:
    root = tree("/a/k1", "/a/b/k2", "/k3")
    scrub.scrub(root, scrub.extra(["/a/**"]))
    assert names(root) == {"/a", "/k3"}
