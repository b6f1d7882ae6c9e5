"""What make says on a machine where it cannot go on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

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


def test_without_a_target_make_lists_what_there_is(clone: Path) -> None:
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
