"""Wheel and source distribution hold the plugin, and nothing of this repository's code location; they give the same wheel."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def built(source: Path, directory: Path, kind: str) -> Path:
    import hatchling.build

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(source)  # a build backend builds the current directory
        return directory / getattr(hatchling.build, f"build_{kind}")(str(directory))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(built(ROOT, tmp_path_factory.mktemp("wheel"), "wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (file,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(file).decode())


def test_only_the_plugin_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"dagster_checkpoints"}


def test_every_module_of_the_plugin_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dagster_checkpoints").rglob("*.py")}
    assert modules <= set(wheel.namelist())
    assert "dagster_checkpoints/py.typed" in wheel.namelist()


def test_the_wheel_names_its_license_and_python(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"java", "pandas"} <= set(metadata.get_all("Provides-Extra", []))
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())
    assert metadata["Author"] and metadata["Keywords"] and "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_changelog_has_the_version_or_prepares_it(metadata: Message) -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, changes = re.findall(r"^## \[(.+?)\](.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)[0]
    assert metadata["Version"] == newest or (newest == "Unreleased" and metadata["Version"] in changes)


def test_the_source_distribution_has_the_plugin_and_its_pages_and_builds_the_same_wheel(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    with tarfile.open(built(ROOT, tmp_path, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("dagster_checkpoints-*/")
    expected = {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "SECURITY.md",
        "dagster_checkpoints",
        "docs",
    }
    assert {path.name for path in source.iterdir()} - {".gitignore", "pyproject.toml"} == expected
    again = zipfile.ZipFile(built(source, tmp_path, "wheel"))
    assert {name: again.getinfo(name).CRC for name in again.namelist()} == {
        name: wheel.getinfo(name).CRC for name in wheel.namelist()
    }
