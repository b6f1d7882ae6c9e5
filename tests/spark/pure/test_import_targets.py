"""Where an import or an export is to write is refused before Spark does any work: here there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.stored_state import export_checkpoint, import_checkpoint
from dagster_checkpoints.state.plain_queries import ExportRefused


@pytest.mark.parametrize(
    "target, told", [("", "expected target=, the directory"), ("savepoints/mine", "Give an absolute path"), ("ftp://a/b", "ftp")]
)
def test_an_impossible_target(target: str, told: str) -> None:
    @unbounded_source(sink=ParquetSink("/nowhere/table"))
    def rows(context: Any) -> Any:
        raise AssertionError

    no_session: Any = None
    with pytest.raises(DagsterCheckpointsError, match=told):
        import_checkpoint(no_session, Pipeline("p", [rows]), "/nowhere", stage="rows", target=target)


@pytest.mark.parametrize("url", ["s3://bucket/query", "s3a://bucket/query", "hdfs://host/query", "file:query"])
@pytest.mark.parametrize("of_output", [False, True])
def test_an_export_to_a_url_is_no_directory_of_that_name_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, of_output: bool
) -> None:
    """The query would have found nothing at the URL, and would have read everything again."""
    monkeypatch.chdir(tmp_path)
    directory, output = ("query", url) if of_output else (url, None)
    with pytest.raises(ExportRefused, match=f"expected a directory of this machine, found the URL '{url}'"):
        export_checkpoint("savepoint", directory, stage="rows", output=output)


def test_an_export_to_a_file_url_is_to_its_directory(tmp_path: Path) -> None:
    full = tmp_path / "a b"
    full.mkdir()
    (full / "file").touch()
    with pytest.raises(ExportRefused, match=f"expected an empty directory, or none, at {full}, found something"):
        export_checkpoint("savepoint", full.as_uri(), stage="rows")
