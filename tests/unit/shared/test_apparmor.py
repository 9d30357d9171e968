"""Records of AppArmor: every form is read, and no text in one becomes a field."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared import apparmor

BODY = (
    'apparmor="DENIED" operation="open" profile="dsec-0abc" name="/etc/shadow" pid=12 '
    'comm="cat" requested_mask="r" denied_mask="r" fsuid=1000 ouid=0'
)
STAMP = "audit(1709000000.123:456): "
FORMS = {
    "netlink": STAMP + BODY,
    "dmesg": f"[ 5442.864673] audit: type=1400 {STAMP}{BODY}",
    "old dmesg": f"[ 3256.689120] type=1400 {STAMP}{BODY}",
    "kmsg": f"5,1234,99887766,-;audit: type=1400 {STAMP}{BODY}\n SUBSYSTEM=x",
    "auditd": f"type=AVC msg={STAMP}{BODY}",
    "enriched": f'node=h1 type=AVC msg={STAMP}{BODY} \x1dUID="root" OUID="root"',
}


@pytest.mark.parametrize("line", FORMS.values(), ids=FORMS.keys())
def test_every_form_gives_the_same_record(line: str) -> None:
    record = apparmor.parse(line)
    assert record is not None
    assert (record.mode, record.operation, record.name) == ("DENIED", "open", "/etc/shadow")
    assert (record.pid, record.comm, record.at, record.serial) == (12, "cat", 1709000000.123, 456)
    assert record.sandbox == "0abc"
    assert record.fields["denied_mask"] == "r"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('apparmor="DENIED" operation="open" profile="p" name=2F6D792067722F742E7079 pid=2',
         {"name": "/my gr/t.py"}),
        ('apparmor="DENIED" operation="capable" class="cap" profile="p" pid=2 comm="h" '
         'capability=21  capname="sys_admin"', {"class": "cap", "capname": "sys_admin"}),
        ('apparmor="DENIED" operation="connect" class="net" namespace="root//lxd" profile="p" '
         'pid=9 comm="nc" family="inet" laddr=10.0.0.1 lport=55 faddr=1.2.3.4 fport=443',
         {"fport": "443", "namespace": "root//lxd"}),
        ('apparmor="DENIED" operation="mount" info="failed mntpnt match" error=-13 '
         'profile="p" name="/mnt/" pid=230', {"info": "failed mntpnt match", "error": "-13"}),
    ],
)  # fmt: skip
def test_newer_and_rarer_fields_are_read(body: str, expected: dict[str, str]) -> None:
    record = apparmor.parse(STAMP + body)
    assert record is not None
    have = {"name": record.name, **record.fields}
    assert {key: have[key] for key in expected} == expected


def written(text: str) -> str:
    """How the kernel writes text that a process chose."""
    data = text.encode("utf-8", "surrogatepass")
    if any(byte < 0x21 or byte > 0x7E or byte == 0x22 for byte in data) or not data:
        return data.hex().upper() or '""'
    return f'"{text}"'


chosen = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
FORGED = 'x" apparmor="ALLOWED" profile="other" pid=1 comm="init'


@given(comm=chosen, name=chosen, profile=chosen)
@example(comm=FORGED, name=FORGED, profile=FORGED)
@example(comm="a\nb", name="audit(1.1:1): " + BODY, profile="dsec-1\x1d x=y")
@example(comm="ABCD", name="41", profile="4142")
def test_text_that_a_process_chose_stays_in_its_field(comm: str, name: str, profile: str) -> None:
    line = (
        f'type=AVC msg={STAMP}apparmor="DENIED" operation="open" profile={written(profile)} '
        f"name={written(name)} pid=7 comm={written(comm)} fsuid=0"
    )
    record = apparmor.parse(line)
    assert record is not None
    assert (record.comm, record.name, record.profile) == (comm, name, profile)
    assert (record.mode, record.pid, dict(record.fields)) == ("DENIED", 7, {"fsuid": "0"})


@given(st.text(max_size=200))
@example("5,1,2,-;" * 30)
@example(STAMP + 'apparmor="DENIED" ' + "a=" * 90)
def test_any_other_text_is_no_record_and_no_error(text: str) -> None:
    for line in (text, STAMP + text, f"type=AVC msg={STAMP}{text}", f"6,1,2,-;{text}"):
        record = apparmor.parse(line)
        assert record is None or "apparmor=" in line


@pytest.mark.parametrize(
    "line",
    [
        f"14,9,9,-;audit: type=1400 {STAMP}{BODY}",  # facility 1: a process wrote it
        f"Nov 29 host app: audit: type=1400 {STAMP}{BODY}",
        f'x {STAMP}{BODY}',
        f'{STAMP}{BODY} pid=99',
        f'{STAMP}{BODY} "',
        f'{STAMP}note="x" {BODY[10:]}',
        STAMP + BODY + "x" * 20_000,
    ],
    ids=["kmsg of a process", "syslog", "in the middle", "twice", "open quote", "no mode", "long"],
)  # fmt: skip
def test_what_breaks_the_rule_is_no_record(line: str) -> None:
    assert apparmor.parse(line) is None
