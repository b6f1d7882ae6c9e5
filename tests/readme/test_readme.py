"""The examples of the README run verbatim, and its lists are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    code = re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert code is not None
    file = tmp_path / "quickstart.py"
    file.write_text(code[1], encoding="utf-8")
    return file


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("CHECKPOINT_STORAGE", "DAGSTER_HOME")}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_quick_example_verbatim_and_a_second_time(quickstart: Path) -> None:
    # 10 days of backfill and 10 of live feed: 20 windows per shop, 12 sales in each; a second run is a new start.
    for _ in range(2):
        ended = run(quickstart.name, folder=quickstart.parent)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert re.search(r"^north +20 +240\.0$", ended.stdout, re.MULTILINE), ended.stdout
        assert re.search(r"^south +20 +240\.0$", ended.stdout, re.MULTILINE), ended.stdout


def test_quick_example_is_a_code_location(quickstart: Path) -> None:
    ended = run("-m", "dagster", "definitions", "validate", "-f", quickstart.name, folder=quickstart.parent)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_commands_are_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", README))
    assert {"run", "dev", "test"} <= named <= targets
