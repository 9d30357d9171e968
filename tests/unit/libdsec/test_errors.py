"""Errors: the closed set, the builtins they also are, what survives a process."""

from __future__ import annotations

import errno
import pickle

import pytest

import libdsec
from libdsec import DSecError, ExecFailed, ExecResult, FileNotFound, SandboxDied
from libdsec._fileerrors import file_error
from libdsec._wire import WireError
from libdsec.errors import BY_CODE, INFRA_CODES, RETRYABLE_CODES, from_wire
from shared import errors as shared_errors


def test_the_codes_are_the_systems() -> None:
    assert set(BY_CODE) == set(shared_errors.BY_CODE)
    assert INFRA_CODES == shared_errors.INFRA_CODES
    retryable = {c for c, type_ in shared_errors.BY_CODE.items() if type_.retryable}
    assert retryable == RETRYABLE_CODES


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_code_has_its_class_and_keeps_its_facts(code: str) -> None:
    wire = WireError(
        code=code, message="m", field="f", retryable=True, cause="oom", is_infra=True,
        retry_after_s=2.0, details={"a": 1},
    )  # fmt: skip
    error = from_wire(wire)
    assert type(error) is BY_CODE[code]
    facts = (error.code, error.message, error.field, error.cause, error.retry_after_s)
    assert facts == (code, "m", "f", "oom", 2.0)
    assert (error.retryable, error.is_infra, error.details) == (True, True, {"a": 1})


def test_an_unknown_code_is_internal_and_keeps_its_name() -> None:
    error = from_wire(WireError(code="novel", message="m"))
    assert isinstance(error, libdsec.InternalError)
    assert error.code == "novel"


@pytest.mark.parametrize(
    ("name", "builtin", "number"),
    [
        ("ENOENT", FileNotFoundError, errno.ENOENT),
        ("EACCES", PermissionError, errno.EACCES),
        ("EISDIR", IsADirectoryError, errno.EISDIR),
        ("ENOTDIR", NotADirectoryError, errno.ENOTDIR),
        ("EEXIST", FileExistsError, errno.EEXIST),
        ("ENOTEMPTY", OSError, errno.ENOTEMPTY),
        ("ENOSPC", OSError, errno.ENOSPC),
    ],
)
def test_file_errors_are_builtins_and_name_the_path(
    name: str, builtin: type[OSError], number: int
) -> None:
    wire = WireError(code="invalid_request", message="no", details={"errno": name})
    error = file_error(wire, "/w/x")
    assert isinstance(error, builtin)
    assert isinstance(error, DSecError)
    assert (error.errno, error.filename, str(error)) == (number, "/w/x", "/w/x: no")
    by_number = file_error(
        WireError(code="invalid_request", message="no", details={"errno": number}), "/w/x"
    )
    assert type(by_number) is type(error)


def test_errors_survive_a_process_boundary() -> None:
    result = ExecResult(exit_code=3, stdout=b"x")
    errors = [
        SandboxDied("gone", cause="node_lost", is_infra=True),
        ExecFailed("false: exit code 3", result),
        FileNotFound("/x: no", path="/x", field="path"),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert again.__dict__ == error.__dict__
        assert (str(again), again.args) == (str(error), error.args)
    assert pickle.loads(pickle.dumps(errors[2])).filename == "/x"


def test_infrastructure_is_told_from_the_sample() -> None:
    assert libdsec.Unavailable("x").is_infra
    assert libdsec.DeadlineExceeded("x").is_infra
    for type_ in (libdsec.ExecFailed, libdsec.ExecTimeout, libdsec.QuotaExceeded):
        assert not type_("x").is_infra
    assert not SandboxDied("x", cause="oom", is_infra=False).is_infra


def test_every_error_says_what_it_is() -> None:
    error = libdsec.InvalidRequest("negative", field="pids_limit")
    assert repr(error) == "InvalidRequest(invalid_request: 'negative', field='pids_limit')"
    assert str(error) == "negative (field pids_limit)"
