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


def entries(lock: Path) -> list[list[str]]:
    return [entry.replace("\\\n", " ").split() for entry in re.split(r"\n(?=\S)", lock.read_text()) if entry.strip()]


def locked(lock: Path = LOCK) -> list[Requirement]:
    return [Requirement(" ".join(word for word in entry if not word.startswith("--hash="))) for entry in entries(lock)]


@pytest.mark.parametrize("lock", [LOCK, *OF_SPARK], ids=lambda lock: lock.name)
def test_every_entry_has_one_version_and_a_sha256(lock: Path) -> None:
    assert entries(lock)
    for entry, requirement in zip(entries(lock), locked(lock), strict=True):
        assert [part.operator for part in requirement.specifier] == ["=="], entry[0]
        hashes = [word for word in entry if word.startswith("--hash=")]
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), entry[0]


@pytest.mark.parametrize("lock", [LOCK, *OF_SPARK], ids=lambda lock: lock.name)
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


def test_every_requirement_of_pyproject_is_locked_in_an_allowed_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]
    versions: dict[str, list[str]] = {}
    for requirement in locked():
        (pin,) = requirement.specifier
        versions.setdefault(canonicalize_name(requirement.name), []).append(pin.version)
    for requirement in asked:
        found = versions.get(canonicalize_name(requirement.name), [])
        assert found, f"{requirement} is not in requirements.lock: run `make lock`"
        assert all(requirement.specifier.contains(version) for version in found), f"{requirement}: {found}"
