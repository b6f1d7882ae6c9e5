"""The matrix of versions in which the package is installed has those that are supported, and the page of support shows it."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from dagster_checkpoints.spark.session.java import SUPPORTED_VERSIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def matrix() -> Any:
    loader = SourceFileLoader("matrix_of_versions", str(ROOT / ".ci/matrix"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = module_from_spec(spec)
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = kept
    return module


def test_its_versions_are_those_that_are_supported(matrix: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locks = [ROOT / "requirements.lock", *ROOT.glob("requirements-spark-*.lock")]
    sparks = {re.search(r"^pyspark==(\d+\.\d+)", lock.read_text(), re.MULTILINE)[1] for lock in locks}  # type: ignore[index]
    assert set(matrix.SPARKS) == sparks
    assert set(matrix.JAVAS) == {str(version) for version in SUPPORTED_VERSIONS}
    classified = {text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r"Python :: 3\.", text)}
    assert set(matrix.PYTHONS) == classified and all(each in SpecifierSet(project["requires-python"]) for each in classified)
    assert set(matrix.EXTRAS) == project["optional-dependencies"].keys() - {"dev", "java", "pandas"}


def test_each_pair_of_python_or_spark_with_lowest_or_newest_has_its_turn(matrix: Any) -> None:
    for axis in ("python", "spark"):
        tried = {(getattr(cell, axis), cell.dagster) for cell in matrix.DIAGONAL}
        assert tried == set(product(getattr(matrix, f"{axis}s".upper()), matrix.DAGSTERS))
    assert {(cell.dagster, cell.java) for cell in matrix.DIAGONAL} == set(product(matrix.DAGSTERS, matrix.JAVAS))
    assert {(cell.python, cell.java) for cell in matrix.DIAGONAL} == set(product(matrix.PYTHONS, matrix.JAVAS))
    assert set(matrix.DIAGONAL) <= set(matrix.CELLS) and len(set(matrix.DIAGONAL)) == 6


def test_the_page_of_support_shows_the_cells(matrix: Any) -> None:
    page = (ROOT / "docs/support.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \| (lowest|newest) \| (\d+) \|$", page, re.MULTILINE)
    assert shown == [(str(turn), cell.python, cell.spark, cell.dagster, cell.java) for turn, cell in enumerate(matrix.DIAGONAL)]
    assert f"The other {len(matrix.CELLS) - len(matrix.DIAGONAL)}\ncombinations" in page
