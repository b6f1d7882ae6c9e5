"""What is handed through a chain of constructors becomes a value: none has more than seven parameters."""

from __future__ import annotations

import ast
from pathlib import Path

import dagster_checkpoints

PACKAGE = Path(dagster_checkpoints.__file__).parent
MOST = 7
WRITTEN_BY_USERS = {"Stage", "FileSink", "IcebergSink", "KafkaSink"}
"""Classes with a setting in each parameter, named where users write them."""


def wide(package: Path) -> dict[str, int]:
    """The classes whose `__init__` has more parameters than `MOST`, without `self`, and how many."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    number = len(each.args.posonlyargs + each.args.args + each.args.kwonlyargs) - 1
                    if number > MOST:
                        found[node.name] = number
    return found


def test_no_constructor_has_more_than_seven_parameters() -> None:
    assert wide(PACKAGE).keys() == WRITTEN_BY_USERS


def test_a_wide_constructor_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class Narrow:\n    def __init__(self, a, b, c, d, e, *, f, g): ...\n"
        "class Wide:\n    def __init__(self, a, b, c, d, e, *, f, g, h): ...\n"
    )
    assert wide(tmp_path) == {"Wide": 8}
