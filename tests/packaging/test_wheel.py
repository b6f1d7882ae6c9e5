"""The wheel holds the plugin, and nothing of this repository's code location."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    import hatchling.build

    directory = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # a build backend builds the current directory
        name = hatchling.build.build_wheel(str(directory))
    return zipfile.ZipFile(directory / name)


def test_only_the_plugin_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"dagster_checkpoints"}


def test_every_module_of_the_plugin_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dagster_checkpoints").rglob("*.py")}
    assert modules <= set(wheel.namelist())
    assert "dagster_checkpoints/py.typed" in wheel.namelist()


def test_the_wheel_names_its_license_and_python(wheel: zipfile.ZipFile) -> None:
    (metadata_file,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(metadata_file).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "java" in metadata.get_all("Provides-Extra", [])
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())
