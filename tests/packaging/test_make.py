"""The errors of make on a machine without its requirements, and the preparations of `make dev`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Not as a part of the make that may have started these tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=60)


def test_without_a_target_make_lists_the_targets(clone: Path) -> None:
    result = make(clone)
    assert result.returncode == 0
    assert {"run", "test", "dev", "check", "bench"} <= {line.split()[1] for line in result.stdout.splitlines()}


@pytest.mark.parametrize("target", ["run", "test", "dev", "check", "bench"])
def test_a_missing_python_is_named(clone: Path, target: str) -> None:
    result = make(clone, target, "PYTHON=no-such-python")
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed; 'no-such-python' is " in result.stderr
    assert "make PYTHON=/path/to/python3.11" in result.stderr
    assert not (clone / ".venv").exists()


def test_an_old_python_is_refused_with_its_version(clone: Path) -> None:
    old = clone / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.13 && exit 0\nexit 1\n')
    old.chmod(0o755)
    result = make(clone, "setup", f"PYTHON={old}")
    assert result.returncode != 0
    assert f"'{old}' is Python 3.10.13" in result.stderr
    assert not (clone / ".venv").exists()


@pytest.fixture
def installed(clone: Path) -> Path:
    """A clone with a virtual environment whose `dagster` command stores a checkpoint where Dagster's runs do, and ends."""
    binaries = clone / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "dagster").write_text(
        f"""#!{sys.executable}
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.storage import CheckpointStorage, open_store
from dagster_checkpoints.storage.root import storage_root

with CheckpointStorage(open_store(storage_root(setting="none")), "flights") as storage:
    storage.acquire(Owner(run_id="run", host="here", pid=1)).release("CANCELED")
"""
    )
    (binaries / "dagster-checkpoints").write_text(f"#!{sys.executable}\nfrom dagster_checkpoints.cli import main\nmain()\n")
    for command in binaries.iterdir():
        command.chmod(0o755)
    (clone / ".venv" / ".installed").touch()
    return clone


@pytest.mark.parametrize("chosen", [None, "elsewhere"])
def test_the_two_lines_of_make_dev_lead_the_command_line_to_its_storage(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    for name in ("CHECKPOINT_STORAGE", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if chosen is not None:
        monkeypatch.setenv("CHECKPOINT_STORAGE", str(tmp_path / chosen))
    result = make(installed, "dev")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("  export ")]
    assert len(lines) == 2, result.stdout
    environment = {name: value for name, value in os.environ.items() if name != "CHECKPOINT_STORAGE"}
    script = "\n".join([*lines, "type -p dagster-checkpoints >&2", "dagster-checkpoints show --json"])
    shown = subprocess.run(["bash", "-c", script], cwd="/", env=environment, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr.splitlines()[0] == str(installed / ".venv/bin/dagster-checkpoints")
    assert "flights" in json.dumps(json.loads(shown.stdout))


@pytest.mark.parametrize(
    "before", [None, "telemetry:\n  enabled: false", "run_monitoring:\n  enabled: true\nnux:\n  enabled: true\n"]
)
def test_make_dev_shows_no_survey_and_keeps_what_the_user_has_set(installed: Path, before: str | None) -> None:
    file = installed / ".dagster_home" / "dagster.yaml"
    if before is not None:
        file.parent.mkdir()
        file.write_text(before)
        os.utime(file, (0, 0))  # of an older release
    assert make(installed, "dev").returncode == 0
    with dg.DagsterInstance.from_config(str(file.parent)) as instance:
        assert not instance.telemetry_enabled
        assert instance.nux_enabled is (before is not None and "nux" in before)
        assert instance.run_monitoring_enabled is (before is not None and "run_monitoring" in before)
