"""Copies of files: hard links where the file system supports them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dagster_checkpoints.files.durable import link_or_copy, link_or_new_file, place


@pytest.fixture(params=[None, errno.EXDEV, errno.EPERM])
def linked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether hard links work; without them the operating system's errors differ."""

    def refuse(source: object, target: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    if request.param is not None:
        monkeypatch.setattr(os, "link", refuse)
    return request.param is None


def test_a_linked_or_copied_file_keeps_its_bytes_and_times(tmp_path: Path, linked: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("rows")
    os.utime(source, (1_000, 2_000))
    assert link_or_copy(source, target) == linked
    assert target.read_text() == "rows"
    assert target.stat().st_mtime == 2_000
    assert target.samefile(source) == linked


def test_a_new_file_has_times_of_its_own_unless_it_is_a_link(tmp_path: Path, linked: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("rows")
    os.utime(source, (1_000, 2_000))
    link_or_new_file(source, target)
    assert target.read_text() == "rows"
    assert (target.stat().st_mtime == 2_000) == target.samefile(source) == linked


def test_what_is_missing_is_an_error(tmp_path: Path, linked: bool) -> None:
    for source, target in (("missing", "target"), ("source", "folder/target")):
        (tmp_path / "source").write_text("rows")
        with pytest.raises(FileNotFoundError):
            link_or_copy(tmp_path / source, tmp_path / target)
        assert not (tmp_path / target).exists()


def test_place_replaces_an_existing_file_and_link_or_copy_does_not(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("new")
    (tmp_path / "target").write_text("old")
    with pytest.raises(FileExistsError):
        link_or_copy(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "old"
    place(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "new"
