"""Code that no run on Spark reaches says so in its first line; and the runtime does not use code that says so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dagster_checkpoints"
RUNTIME = ("plugin", "cli", "spark", "sources", "sinks", "control", "storage")
"""The floors above the pure ones."""
UNREACHED = {
    "coordination/config.py": ("max_queued", "keep_on_finish"),
    "execution/input_channel.py": ("overtaken",),
}
"""By module of the core, names in it, or settings, that no run reaches."""


def text_of_runtime() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for floor in RUNTIME for file in (PACKAGE / floor).rglob("*.py"))


@pytest.mark.parametrize("module", UNREACHED)
def test_a_module_says_what_no_run_reaches(module: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    said = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)]
    assert any(re.search(r"no run on Spark\s+reaches|no state moves yet", text, re.IGNORECASE) for text in said)


@pytest.mark.parametrize("module", UNREACHED)
def test_the_runtime_uses_nothing_that_is_said_to_be_unreached(module: str) -> None:
    text = text_of_runtime()
    assert [name for name in UNREACHED[module] if re.search(rf"\b{name}\b", text)] == []
