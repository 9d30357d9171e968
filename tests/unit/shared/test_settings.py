"""Settings: from the environment, typed, with the variable's name in the error."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from shared.settings import Common, load


class Example(Common, kw_only=True):
    pg_dsn: str
    workers: int = 4
    ratio: float = 0.5
    verbose: bool = False


def test_values_are_typed_and_defaults_stay() -> None:
    made = load(Example, {"DSEC_PG_DSN": "x", "DSEC_WORKERS": "7", "DSEC_VERBOSE": "true"})
    assert (made.pg_dsn, made.workers, made.ratio, made.verbose) == ("x", 7, 0.5, True)
    assert made.nats_url == "nats://127.0.0.1:4222"


@pytest.mark.parametrize(
    ("env", "variable"),
    [
        ({}, "DSEC_PG_DSN"),
        ({"DSEC_PG_DSN": "x", "DSEC_WORKERS": "many"}, "DSEC_WORKERS"),
        ({"DSEC_PG_DSN": "x", "DSEC_RATIO": ""}, "DSEC_RATIO"),
    ],
)
def test_a_bad_or_missing_value_names_its_variable(env: dict[str, str], variable: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(Example, env)
    assert variable in caught.value.message


def test_a_secret_may_come_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "dsn"
    file.write_text("from-file\n")
    assert load(Example, {"DSEC_PG_DSN_FILE": str(file)}).pg_dsn == "from-file"
    both = {"DSEC_PG_DSN_FILE": str(file), "DSEC_PG_DSN": "direct"}
    assert load(Example, both).pg_dsn == "direct"


def test_a_secret_file_that_is_missing_names_its_variable(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="DSEC_PG_DSN_FILE"):
        load(Example, {"DSEC_PG_DSN_FILE": str(tmp_path / "none")})


def test_variables_of_others_are_ignored() -> None:
    assert load(Example, {"DSEC_PG_DSN": "x", "DSEC_UNKNOWN": "y", "PG_DSN": "z"}).pg_dsn == "x"
