"""The command line as a separate process: exit codes, no traceback, and packages that it does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.cli import main
from dagster_checkpoints.cli.exits import Exit
from dagster_checkpoints.control.requests import Answer
from dagster_checkpoints.storage.root import NoStorageError, storage_root

HEAVY = ("boto3", "dagster", "pandas", "pyarrow", "pyspark")


def run(world: Any, *arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments] if code else [sys.executable, "-m", "dagster_checkpoints.cli", *arguments]
    environment = {**os.environ, **world.environment, "CHECKPOINT_STORAGE": world.url}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_second_process_sends_a_request_and_gets_the_answer(world: Any) -> None:
    world.run()
    world.answering(
        lambda request: Answer(
            request_id=request.request_id, status="done", checkpoint_id=43, url="here", answered_at=datetime.now(UTC)
        )
    )
    ran = run(world, "savepoint", "--name", "by-hand", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["answer"]["checkpoint_id"] == 43


def test_a_second_process_finds_a_flipped_byte(world: Any) -> None:
    world.run()
    location = world.savepoint(43)
    assert run(world, "verify", location).returncode == 0
    world.store.put(f"flights/{location}/state/{world.files['the airlines'].sha256}", b"the aIrlines")
    ran = run(world, "verify", location)
    assert ran.returncode == 1 and "wrong content" in ran.stdout and "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("list",), 6, "Is it the right --storage?"),
        (("trigger", "--pipeline", "flights"), 6, "found no pipeline of that name in it"),
        (("verify",), 2, "Missing argument 'LOCATION'"),
        (("nonsense",), 2, "No such command 'nonsense'"),
        (("list", "--storage", "ftp://x/y"), 2, "that kind is not supported"),
        (("list", "--storage", "s3://bucket/x", "--profile", "no-such-profile"), 2, "no-such-profile"),
        (("show", "/no/such/savepoint"), 6, "expected the metadata of a savepoint at file:///no/such/savepoint"),
    ],
)
def test_a_users_mistake_is_reported_without_a_traceback(local: Any, arguments: tuple[str, ...], code: int, part: str) -> None:
    ran = run(local, *arguments)
    assert ran.returncode == code and part in ran.stderr
    assert "Traceback" not in ran.stderr and ran.stdout == ""


def test_reading_commands_load_neither_spark_nor_dagster(local: Any) -> None:
    local.run()
    local.checkpoint(42)
    local.savepoint(43)
    local.status()
    code = (
        "import sys\nfrom dagster_checkpoints.cli.app import app\n"
        "app(standalone_mode=False)\n"
        f"print('loaded', [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    for arguments in (
        ("list", "-l"),
        ("show",),
        ("show", "42"),
        ("watch", "--once"),
        ("graph",),
        ("verify", "43"),
        ("requests",),
    ):
        ran = run(local, *arguments, code=code)
        assert ran.stderr == "loaded []\n", arguments


def test_a_closed_pipe_is_not_an_error(local: Any) -> None:
    local.run()
    environment = {**os.environ, **local.environment, "CHECKPOINT_STORAGE": local.url}
    command = f"{sys.executable} -m dagster_checkpoints.cli list --json | head -c 1"
    ran = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout == "{" and "Traceback" not in ran.stderr


@pytest.fixture(params=[("full", 7), ("closed", 141)], ids=lambda param: param[0])
def unwritable(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A standard output that cannot be written, and the exit code that says so."""
    kind, code = request.param
    if kind == "full":
        file = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, file = os.pipe()
        os.close(reader)
    yield file, code
    os.close(file)


def run_into(file: int, world: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dagster_checkpoints.cli", *arguments]
    environment = {**os.environ, **world.environment, "CHECKPOINT_STORAGE": world.url}
    return subprocess.run(command, env=environment, stdout=file, stderr=subprocess.PIPE, text=True, timeout=120)


@pytest.mark.parametrize(
    "command", ["--help", "list --help", "list", "list --json", "health", "graph --format mermaid", "watch --once", "requests"]
)
def test_an_output_that_cannot_be_written_has_its_own_exit_code(local: Any, unwritable: tuple[int, int], command: str) -> None:
    local.run()
    local.checkpoint(42)
    local.status()
    file, code = unwritable
    ran = run_into(file, local, *command.split())
    found = "" if code == 141 else "error: expected to write the result to standard output, found: No space left on device\n"
    assert (ran.returncode, ran.stderr) == (code, found)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_was_done_is_said_although_the_output_cannot_be_written(
    local: Any, unwritable: tuple[int, int], form: list[str]
) -> None:
    local.run()
    local.answering(
        lambda request: Answer(
            request_id=request.request_id, status="done", checkpoint_id=43, url="here", answered_at=datetime.now(UTC)
        )
    )
    file, code = unwritable
    ran = run_into(file, local, "savepoint", *form)
    assert ran.returncode == code and "Traceback" not in ran.stderr
    assert "Savepoint 43 is complete" in ran.stderr and "here" in ran.stderr
    location = local.savepoint(44)
    ran = run_into(file, local, "dispose", "--yes", "--force", location, *form)
    assert ran.returncode == code and "Deleted " in ran.stderr and location in ran.stderr


def test_an_interruption_while_modules_are_imported_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == "dagster_checkpoints.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dagster_checkpoints.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == Exit.INTERRUPTED and capsys.readouterr().err == "error: interrupted\n"


def test_arguments_that_are_not_utf8_are_refused(local: Any) -> None:
    local.run()
    for arguments in (
        ["end-source", "s\udcff"],
        ["end-source", "live", "--instance", "\udcff"],
        ["savepoint", "--target", "/t\udcff"],
    ):
        ran = run(local, *arguments, "--no-wait")
        assert ran.returncode == 2 and "is text in UTF-8, found" in ran.stderr and "Traceback" not in ran.stderr, arguments


def test_the_help_lists_commands_and_exit_codes(local: Any) -> None:
    text = run(local, "--help").stdout
    for part in ("savepoint", "end-source", "dispose", "Exit codes:", "130", "the pipeline is not running"):
        assert part in text
    for command in (
        "list",
        "show",
        "watch",
        "graph",
        "trigger",
        "savepoint",
        "stop",
        "end-source",
        "requests",
        "verify",
        "dispose",
    ):
        shown = local.cli(command, "--help").output
        assert "--storage" in shown and "--json" in shown


# The choice of the storage


def test_the_storage_that_is_chosen_wins(tmp_path: Path) -> None:
    variables = {"CHECKPOINT_STORAGE": "s3://b/x", "DAGSTER_HOME": str(tmp_path)}
    assert storage_root("/chosen", setting="x", environment=variables) == "/chosen"
    assert storage_root(None, setting="x", environment=variables) == "s3://b/x"
    assert storage_root("", setting="x", environment={**variables, "CHECKPOINT_STORAGE": ""}) == str(tmp_path / "checkpoints")
    assert storage_root(None, instance_directory="/kept", setting="x", environment={}) == "/kept/checkpoints"
    with pytest.raises(NoStorageError, match=r"Set --storage .*CHECKPOINT_STORAGE or DAGSTER_HOME"):
        storage_root(None, setting="--storage", environment={})


def test_a_relative_dagster_home_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_root(None, setting="x", environment={"DAGSTER_HOME": "home"}) == str(tmp_path / "home" / "checkpoints")
