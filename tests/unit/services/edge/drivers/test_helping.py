"""A short program that waits until it is needed, and that a thread waits for."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.edge.drivers.container.helping import SAID_MAX, Ended, Helper

SHELL = Path("/bin/sh")
LONG = "-" * 2_000_000


@contextmanager
def helper(text: str, fds: Sequence[int] = (), *, within_s: float = 60.0) -> Iterator[Helper]:
    """One that is ready; ``text`` comes when it was told what to do, which is in ``$told``."""
    script = f"printf '\\0'; told=$(tr '\\0' ' '); {text}"
    made = Helper(SHELL, ["-c", script], fds, within_s=within_s)
    try:
        yield made
    finally:
        made.close()


def sh(
    text: str, words: Sequence[str] = (), fds: Sequence[int] = (), *, within_s: float = 60.0
) -> Ended:
    with helper(text, fds) as made:
        return made.run(words, (), within_s=within_s)


def test_its_end_and_its_errors_are_told() -> None:
    assert sh("true") == Ended(0, "")
    assert sh("echo the words >&2; exit 3") == Ended(3, "the words")
    assert sh("kill -9 $$") == Ended(-9, "")


def test_it_is_told_what_to_do() -> None:
    assert sh('echo "$told" >&2', ["one", "", "a word"]).said == "one  a word"
    assert sh('echo "${#told}" >&2', [LONG]).said == str(len(LONG) + 1)


def test_it_is_given_descriptors_with_the_words(tmp_path: Path) -> None:
    took = tmp_path / "took"
    script = (
        "import os, socket; s = socket.socket(fileno=0); os.write(1, b'\\0'); "
        "words, fds, _, _ = socket.recv_fds(s, 100, 1); "
        f"open({str(took)!r}, 'wb').write(words + os.read(fds[0], 100))"
    )
    file = tmp_path / "file"
    file.write_text("content")
    made = Helper(Path(shutil.which("python3") or ""), ["-c", script], (), within_s=60.0)
    fd = os.open(file, os.O_RDONLY)
    try:
        assert made.run(["go"], (fd,), within_s=60.0) == Ended(0, "")
    finally:
        os.close(fd)
    assert took.read_bytes() == b"go\0content"


def test_one_that_says_more_than_is_kept_ends() -> None:
    said = sh("i=0; while [ $i -lt 9000 ]; do echo 0123456789 >&2; i=$((i+1)); done").said
    assert len(said.encode()) <= SAID_MAX and said.startswith("0123456789\n0123456789")


def test_it_has_the_descriptors_that_are_given_and_no_other() -> None:
    given, other = os.open("/", os.O_RDONLY), os.open("/", os.O_RDONLY)
    try:
        listed = sh("ls /proc/$$/fd >&2", fds=(given,)).said.split()
    finally:
        os.close(given)
        os.close(other)
    assert str(given) in listed and str(other) not in listed
    assert {"0", "1", "2"} <= set(listed)


def test_it_has_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_SECRET", "x")
    assert "DSEC_SECRET" not in sh("export >&2").said


def test_it_is_called_back_while_it_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with helper(f"until [ -e {mark} ]; do :; done; exit 5") as made:
        assert made.run([], (), within_s=60.0, goes=mark.touch).code == 5


def test_one_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        sh(f"echo $$ > {noted}.new; mv {noted}.new {noted}; exec sleep 1000", within_s=0.5)
    if noted.exists():  # on a busy machine it may not even have begun
        assert not Path(f"/proc/{noted.read_text().strip()}").exists()


def test_what_fails_while_it_runs_ends_it() -> None:
    def fails() -> None:
        raise ValueError("no")

    began = time.monotonic()
    with helper("exec sleep 1000") as made, pytest.raises(ValueError, match="no"):
        made.run([], (), within_s=1000.0, goes=fails)
    assert time.monotonic() - began < 900


def test_one_that_nobody_needs_ends_undone(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with helper(f"touch {mark}") as made:
        pid = made._pid
        made.close()
    assert not Path(f"/proc/{pid}").exists() and not mark.exists()
    with pytest.raises(OSError, match="descriptor"):
        made.run([], (), within_s=60.0)


def test_one_that_ended_while_it_waited_says_how() -> None:
    made = Helper(SHELL, ["-c", "printf '\\0'; echo why >&2; exit 4"], (), within_s=60.0)
    assert made.run([LONG], (), within_s=60.0) == Ended(4, "why")


def test_one_that_does_not_become_ready_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="why"):
        Helper(SHELL, ["-c", "echo why >&2; exit 4"], (), within_s=60.0)
    with pytest.raises(OSError, match="at once"):
        Helper(SHELL, ["-c", "true"], (), within_s=60.0)
    with pytest.raises(TimeoutError):
        Helper(SHELL, ["-c", "exec sleep 1000"], (), within_s=0.2)
    with pytest.raises(FileNotFoundError):
        Helper(tmp_path / "none", [], (), within_s=60.0)
    text = tmp_path / "text"
    shutil.copy(__file__, text)
    text.chmod(0o644)
    with pytest.raises(PermissionError):
        Helper(text, [], (), within_s=60.0)
