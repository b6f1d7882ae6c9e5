"""The locks: complete, hashed, in keeping with pyproject.toml, and bound to no particular package index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
OF_SPARK = sorted(ROOT.glob("requirements-spark-*.lock"))
"""Each pins PySpark alone: its environment takes all other packages from that of `requirements.lock`."""
OF_DOCS = ROOT / "requirements-docs.lock"
"""The generator of the site: packages that `requirements.lock` has too are locked in the same version."""


def entries(lock: Path) -> list[list[str]]:
    return [entry.replace("\\\n", " ").split() for entry in re.split(r"\n(?=\S)", lock.read_text()) if entry.strip()]


def locked(lock: Path = LOCK) -> list[Requirement]:
    return [Requirement(" ".join(word for word in entry if not word.startswith("--hash="))) for entry in entries(lock)]


@pytest.mark.parametrize("lock", [LOCK, OF_DOCS, *OF_SPARK], ids=lambda lock: lock.name)
def test_every_entry_has_one_version_and_a_sha256(lock: Path) -> None:
    assert entries(lock)
    for entry, requirement in zip(entries(lock), locked(lock), strict=True):
        assert [part.operator for part in requirement.specifier] == ["=="], entry[0]
        hashes = [word for word in entry if word.startswith("--hash=")]
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), entry[0]


@pytest.mark.parametrize("lock", [LOCK, OF_DOCS, *OF_SPARK], ids=lambda lock: lock.name)
def test_the_lock_names_no_index_and_no_path(lock: Path) -> None:
    assert "://" not in lock.read_text()
    assert not re.search(r"^\s*(-i|-f|--(extra-)?index-url|--find-links|--trusted-host)\b", lock.read_text(), re.MULTILINE)


def test_each_other_version_of_spark_has_a_lock_of_pyspark_alone() -> None:
    (newest,) = (requirement for requirement in locked() if requirement.name == "pyspark")
    assert [lock.name for lock in OF_SPARK] == ["requirements-spark-4.1.lock", "requirements-spark-4.2.lock"]
    for lock in OF_SPARK:
        (requirement,) = locked(lock)
        (pin,) = requirement.specifier
        assert requirement.name == "pyspark" and lock.name == f"requirements-spark-{'.'.join(pin.version.split('.')[:2])}.lock"
        assert not newest.specifier.contains(pin.version), "it is the version of requirements.lock"


def versions(lock: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for requirement in locked(lock):
        (pin,) = requirement.specifier
        found.setdefault(canonicalize_name(requirement.name), []).append(pin.version)
    return found


def test_every_requirement_of_pyproject_is_locked_in_an_allowed_version() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = table["project"]
    for lock, asked in (
        (LOCK, project["dependencies"] + project["optional-dependencies"]["dev"]),
        (OF_DOCS, table["dependency-groups"]["docs"]),
    ):
        for requirement in map(Requirement, asked):
            found = versions(lock).get(canonicalize_name(requirement.name), [])
            assert found, f"{requirement} is not in {lock.name}: run `make lock`"
            assert all(requirement.specifier.contains(version) for version in found), f"{requirement}: {found}"


def test_the_generator_of_the_site_runs_with_the_packages_that_the_plugin_is_tested_with() -> None:
    of_plugin = versions(LOCK)
    assert {name: found for name, found in versions(OF_DOCS).items() if found != of_plugin.get(name, found)} == {}
