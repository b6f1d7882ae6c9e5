"""Locations with characters that a library or a URL would take for something else: used exactly, or refused at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.files.urls import local_path, validate_root
from dagster_checkpoints.sinks import DeltaSink, FileSink, IcebergSink
from dagster_checkpoints.sources import read_delta_table
from dagster_checkpoints.spark.session.work_directory import parse_work_directory


@pytest.mark.parametrize("letters", ["[", "]", "^", "|", "\\", "\t", "\x7f", "%20", "%5B"])
def test_a_delta_table_where_the_library_would_fail(tmp_path: Path, letters: str) -> None:
    place = tmp_path / f"x{letters}y"
    makers: list[Callable[[Any], Any]] = [DeltaSink, lambda path: read_delta_table(None, path)]  # type: ignore[arg-type]
    link = tmp_path / "link"
    place.mkdir()
    link.symlink_to(place)
    for make in makers:
        for path in (place / "t", link / "t"):
            with pytest.raises(DagsterCheckpointsError, match="location that the library deltalake can use, without"):
                make(path)


@pytest.mark.parametrize("letters", ["{a,b}", "*", "?", "#", "%", "50%", " ", "+", "=", ":", "ü", "'\"", "&;"])
def test_a_delta_table_at_other_places(tmp_path: Path, letters: str) -> None:
    sink = DeltaSink(tmp_path / letters)
    assert sink.location == str(tmp_path / letters) and local_path(sink.uri) == tmp_path / letters


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DeltaSink("file:///data/a#b"), "'#', '.' and '%' of a path are written %23, %3F and %25"),
        (lambda: FileSink("file:///data/a?b"), "'#', '.' and '%' of a path are written %23, %3F and %25"),
        (lambda: IcebergSink("a.b", warehouse="file:///data/a#b"), "'#', '.' and '%' of a path are written"),
        (lambda: parse_work_directory("file:///data/a#b"), "'#', '.' and '%' of a path are written"),
        (lambda: validate_root("file:///data/a?b"), "'#', '.' and '%' of a path are written"),
        (lambda: FileSink("s3://bucket/a#b"), "a URL of a place has no '.' and no '#'"),
        (lambda: DeltaSink("s3://bucket/a?b"), "a URL of a place has no '.' and no '#'"),
        (lambda: IcebergSink("a.b", warehouse="s3://lake/a#b", catalog={}), "the URL of a warehouse has no '.' and no '#'"),
    ],
)
def test_a_url_of_which_a_part_would_be_left_out(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(DagsterCheckpointsError, match=text):
        make()


def test_a_file_url_with_encoded_characters() -> None:
    assert FileSink("file:///data/a%23%3F%25").location == "/data/a#?%"
