"""What Inspect's checks leave open: limits, dead sandboxes, processes that hide, several
sandboxes a sample, streaming."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxUnavailableError,
)
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
from inspect_ai.util._sandbox.exec_remote import ExecRemoteAwaitableOptions
from inspect_ai.util._sandbox.limits import (
    override_max_exec_output_size,
    override_max_read_file_size,
)

from libdsec import DSecClient, Unavailable
from libdsec.ext.inspect import DSecSandboxEnvironment
from libdsec.ext.inspect.config import ConfigError, load

CONFIG = str(Path(__file__).parent / "dsec.yaml")
LIST_PROCESSES = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"


@pytest.mark.parametrize(
    "script",
    [
        "setsid sleep 4242 & sleep 4242",
        "(setsid sh -c 'sleep 4242 & sleep 4242' &) ; sleep 4242",
        "set -m; sleep 4242 & sleep 4242",
        "trap '' TERM INT HUP; sleep 4242 & while :; do sleep 4242; done",
        "sleep 4242 <&- >&- 2>&- & exec sleep 4242 >/dev/null 2>&1",
    ],
    ids=["new session", "double fork", "other process group", "deaf to signals", "no output"],
)
async def test_a_timeout_leaves_no_process_whatever_it_did_to_hide(
    sandbox_env: SandboxEnvironment, script: str
) -> None:
    with pytest.raises(TimeoutError):
        await sandbox_env.exec(["bash", "-c", script], timeout=1)
    listed = await sandbox_env.exec(["sh", "-c", LIST_PROCESSES], user="root")
    assert "sleep 4242" not in listed.stdout.replace(LIST_PROCESSES, "")


async def test_the_process_list_would_show_one(sandbox_env: SandboxEnvironment) -> None:
    await sandbox_env.exec(["sh", "-c", "sleep 4242 >/dev/null 2>&1 &"])
    listed = await sandbox_env.exec(["sh", "-c", LIST_PROCESSES], user="root")
    assert "sleep 4242" in listed.stdout


async def test_a_timeout_carries_the_partial_output(sandbox_env: SandboxEnvironment) -> None:
    with pytest.raises(TimeoutError) as caught:
        await sandbox_env.exec(["sh", "-c", "echo begun; sleep 60"], timeout=5)
    assert caught.value.truncated_output == "begun\n"  # type: ignore[attr-defined]


async def test_output_over_the_limit_of_the_call_is_an_error_and_not_a_cut(
    sandbox_env: SandboxEnvironment,
) -> None:
    command = ["sh", "-c", "seq 1 2000"]
    assert (await sandbox_env.exec(command)).stdout.endswith("\n2000\n")
    with override_max_exec_output_size(1024), pytest.raises(OutputLimitExceededError) as caught:
        await sandbox_env.exec(command)
    assert caught.value.limit_str == "1 KiB"
    kept = caught.value.truncated_output or ""
    assert kept.startswith("1\n2\n") and kept.endswith("\n2000\n") and len(kept) <= 1024


async def test_output_of_exactly_the_limit_is_whole(sandbox_env: SandboxEnvironment) -> None:
    with override_max_exec_output_size(1024):
        result = await sandbox_env.exec(["sh", "-c", "head -c 1024 /dev/zero | tr '\\0' x"])
    assert result.stdout == "x" * 1024


async def test_a_file_of_exactly_the_limit_is_read(sandbox_env: SandboxEnvironment) -> None:
    await sandbox_env.write_file("exact", "x" * 1024)
    with override_max_read_file_size(1024):
        assert await sandbox_env.read_file("exact") == "x" * 1024


async def test_line_ends_stay_and_bad_utf8_is_an_error_of_text_only(
    sandbox_env: SandboxEnvironment,
) -> None:
    await sandbox_env.write_file("dos.txt", "a\r\nb\r\n")
    assert await sandbox_env.read_file("dos.txt") == "a\r\nb\r\n"
    await sandbox_env.write_file("raw", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        await sandbox_env.read_file("raw")
    assert await sandbox_env.read_file("raw", text=False) == b"\xff"


async def test_output_that_is_no_utf8_is_replaced(sandbox_env: SandboxEnvironment) -> None:
    result = await sandbox_env.exec(["printf", "a\\377b"])
    assert result.stdout == "a�b"


async def test_a_missing_executable_and_a_missing_directory_are_results(
    sandbox_env: SandboxEnvironment,
) -> None:
    missing = await sandbox_env.exec(["no-such-program"])
    assert (missing.success, missing.returncode) == (False, 127)
    assert "no-such-program" in missing.stderr
    nowhere = await sandbox_env.exec(["true"], cwd="/no/such/place")
    assert not nowhere.success and "/no/such/place" in nowhere.stderr


async def test_a_program_that_says_126_itself_is_a_result(sandbox_env: SandboxEnvironment) -> None:
    assert (await sandbox_env.exec(["sh", "-c", "exit 126"])).returncode == 126


async def test_the_environment_is_not_the_callers(sandbox_env: SandboxEnvironment) -> None:
    result = await sandbox_env.exec(["env"])
    names = {line.partition("=")[0] for line in result.stdout.splitlines()}
    assert not names & {"COLUMNS", "LINES", "DSEC_API_KEY", "DSEC_URL"}


async def test_files_belong_to_the_user_and_parents_too(sandbox_env: SandboxEnvironment) -> None:
    await sandbox_env.write_file("new/dir/file", "x")
    owners = await sandbox_env.exec(["stat", "-c", "%U", "new", "new/dir", "new/dir/file"])
    assert owners.stdout == "agent\n" * 3


async def test_commands_of_one_sandbox_run_at_once(sandbox_env: SandboxEnvironment) -> None:
    here = "/tmp/meet"
    meet = (
        f"mkdir -p {here}; : >{here}/$0; until [ $(ls {here} | wc -l) = 8 ]; do sleep .1; done"
    )
    calls = (sandbox_env.exec(["sh", "-c", meet, str(n)], timeout=60) for n in range(8))
    results = await asyncio.gather(*calls)
    assert all(result.success for result in results)


async def test_a_sandbox_that_is_gone_is_unavailable_and_no_result(
    sandbox_env: SandboxEnvironment,
) -> None:
    await sandbox_env.as_type(DSecSandboxEnvironment).sandbox.stop()
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.exec(["true"])
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.read_file("/etc/passwd")
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.write_file("x", "x")
    with pytest.raises(ConnectionError):
        await sandbox_env.connection()


async def test_a_connection_names_a_command(sandbox_env: SandboxEnvironment) -> None:
    connection = await sandbox_env.connection(user="root")
    id = sandbox_env.as_type(DSecSandboxEnvironment).sandbox.id
    assert connection.command == f"dsec shell {id} --user root"


async def test_inspects_streaming_commands_work(sandbox_env: SandboxEnvironment) -> None:
    options = ExecRemoteAwaitableOptions(timeout=60)
    seen = SandboxEnvironmentProxy(sandbox_env)  # what samples get from Inspect
    result = await seen.exec_remote(["sh", "-c", "whoami; exit 3"], options, stream=False)
    assert (result.returncode, result.stdout) == (3, "agent\n")


async def test_several_sandboxes_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "sandboxes:\n"
        "  other: {image: 'client:1', user: root}\n"
        "  default: {image: 'client:1', user: agent, workdir: /made/here}\n"
    )
    provider = DSecSandboxEnvironment
    environments = await provider.sample_init("two", str(path), {})
    try:
        assert list(environments) == ["default", "other"]
        said = [(await e.exec(["sh", "-c", "whoami; pwd"])).stdout for e in environments.values()]
        assert said == ["agent\n/made/here\n", "root\n/\n"]
        await environments["default"].write_file("mine", "x")
    finally:
        await provider.sample_cleanup("two", str(path), environments, False)


async def test_a_sandbox_that_cannot_be_stopped_now_is_stopped_at_the_tasks_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provider = DSecSandboxEnvironment
    await provider.task_init("late", CONFIG)
    environments = await provider.sample_init("late", CONFIG, {})
    sandbox = environments["default"].as_type(DSecSandboxEnvironment).sandbox

    async def away(*_args: object, **_options: object) -> None:
        raise Unavailable("the service is away")

    with monkeypatch.context() as patch:
        patch.setattr(DSecClient, "stop_many", away)
        await provider.sample_cleanup("late", CONFIG, environments, False)
    assert "the service is away" in caplog.text
    assert (await sandbox.info()).state == "running"
    await provider.task_cleanup("late", CONFIG, True)
    async with DSecClient() as client:
        assert (await (await client.get(sandbox.id)).info()).state == "stopped"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("user: agent", "image"),
        ("image: a\nlimits: {cores: 1}", "limits.cores"),
        ("image: a\nsandboxes: {default: {image: b}}", "image"),
        ("image: a\nworkdir: relative", "workdir"),
        ("image: [", "line 1"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "dsec.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load(str(path))


def test_metadata_fills_values_and_never_structure(tmp_path: Path) -> None:
    path = tmp_path / "dsec.yaml"
    path.write_text("image: ${SAMPLE_METADATA_MY_IMAGE}\n")
    config = load(str(path), {"my image": "x\nuser: root"})
    assert (config.image, config.user) == ("x\nuser: root", None)
