"""One word, one thing: no two classes of the plugin have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import dagster_checkpoints

PACKAGE = Path(dagster_checkpoints.__file__).parent


def modules_by_class(package: Path) -> dict[str, list[str]]:
    """The modules that define a class of each name, nested classes included."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(package).as_posix())
    return found


def test_each_class_name_is_used_once() -> None:
    found = modules_by_class(PACKAGE)
    assert len(found) > 300, "the package was searched"
    del found["Java"]  # py4j asks each class that Java calls for a class of this name
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_a_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Cursor: ...\n")
    (tmp_path / "b.py").write_text("class Outer:\n    class Cursor: ...\n")
    assert modules_by_class(tmp_path) == {"Cursor": ["a.py", "b.py"], "Outer": ["b.py"]}
