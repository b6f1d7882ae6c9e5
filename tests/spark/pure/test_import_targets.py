"""Where an import is to write is refused before Spark does any work: here there is none."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.stored_state import import_checkpoint


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
