"""What is logged once in a run."""

from __future__ import annotations

import logging

import pytest

from dagster_checkpoints.spark.job.runtime import OnceLog
from dagster_checkpoints.spark.query.source_checks import SourceWarning


def test_a_text_is_logged_once_and_explained_of_the_first_source_only(caplog: pytest.LogCaptureFixture) -> None:
    once = OnceLog(logging.getLogger("of a run"))
    unlimited = [SourceWarning(f"Stage {name!r}: kafka", "has no limit", "all rows become one batch.") for name in "abc"]
    other = SourceWarning("Stage 'b': kafka", "has failOnDataLoss=false", "rows are skipped.")
    for _ in range(2):
        for text in (unlimited[0], "plain", unlimited[1], other, "plain", unlimited[2]):
            once(logging.WARNING, text)
    assert [record.getMessage() for record in caplog.records] == [
        "Stage 'a': kafka has no limit: all rows become one batch.",
        "plain",
        "Stage 'b': kafka has no limit, see above.",
        "Stage 'b': kafka has failOnDataLoss=false: rows are skipped.",
        "Stage 'c': kafka has no limit, see above.",
    ]
