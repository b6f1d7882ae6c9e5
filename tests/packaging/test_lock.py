"""The lock: complete, hashed, in keeping with pyproject.toml, and bound to no particular package index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
ENTRIES = [entry.replace("\\\n", " ").split() for entry in re.split(r"\n(?=\S)", LOCK) if entry.strip()]


def locked() -> list[Requirement]:
    return [Requirement(" ".join(word for word in entry if not word.startswith("--hash="))) for entry in ENTRIES]


def test_every_entry_has_one_version_and_a_sha256() -> None:
    assert ENTRIES
    for entry, requirement in zip(ENTRIES, locked(), strict=True):
        assert [part.operator for part in requirement.specifier] == ["=="], entry[0]
        hashes = [word for word in entry if word.startswith("--hash=")]
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), entry[0]


def test_the_lock_names_no_index_and_no_path() -> None:
    assert "://" not in LOCK
    assert not re.search(r"^\s*(-i|-f|--(extra-)?index-url|--find-links|--trusted-host)\b", LOCK, re.MULTILINE)


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
