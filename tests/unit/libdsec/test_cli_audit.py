"""What ``dsec audit`` is asked for and there is none of."""

from __future__ import annotations

import time

import pytest

from libdsec.cli.audit import KINDS, _known, moment
from libdsec.errors import InvalidRequest


def test_a_kind_that_there_is_none_of_is_named() -> None:
    assert [_known(kind) for kind in (None, *KINDS)] == [None, *KINDS]
    with pytest.raises(InvalidRequest, match="'crimes' is none of access, violation") as caught:
        _known("crimes")
    assert caught.value.field == "kind"


def test_what_is_no_time_is_named_with_what_is() -> None:
    assert moment("12.5", "since") == 12.5
    ago = moment("15m", "since")
    assert ago is not None and 800 < time.time() - ago < 1000
    with pytest.raises(InvalidRequest, match=r"'soon' is no time .*15m") as caught:
        moment("soon", "since")
    assert caught.value.field == "since"
