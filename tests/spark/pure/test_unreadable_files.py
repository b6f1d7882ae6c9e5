"""Which of the sources of a query reads a file that Spark could not read."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.spark.query import error_text
from dagster_checkpoints.spark.query.error_text import source_of_file, unreadable_file


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("file:///data/in/a.parquet", "in"),
        ("file:///data/in/day=1/a%20b.parquet", "in"),
        ("file:///data/in-late/a.parquet", "late"),  # not of the one whose path its path begins with
        ("file:///data/in/deep/a.parquet", "deep"),
        ("file:///data/by-day-1/a.parquet", "days"),
        ("file:///data/one.csv", "one"),
        ("file:///data/other/a.parquet", None),
    ],
)
def test_the_source_of_a_file(file: str, source: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    read = {
        "in": "file:/data/in",
        "late": "/data/in-late/",
        "deep": "/data/in/deep",
        "days": "/data/by-day-*/",
        "one": "/data/one.csv",
    }
    sources: dict[str, Any] = {name: f"FileSource[{path}]" for name, path in read.items()}
    monkeypatch.setattr(error_text, "streams", lambda frame: (frame,))
    monkeypatch.setattr(error_text, "stream_name", lambda leaf: leaf)
    assert source_of_file(file, sources) == source


def test_a_cause_of_several_lines_is_shown_whole() -> None:
    """Spark says in further lines of its message which names a CSV file has in its first line."""
    error = Exception(
        "SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///in/2.csv.  SQLSTATE: KD001\n"
        "\tat org.apache.spark.Executor.run(Executor.scala:1)\n"
        "Caused by: org.apache.spark.SparkIllegalArgumentException: CSV header does not conform to the schema.\n"
        " Header: b, a\n Schema: a, b\nExpected: a but found: b\nCSV file: file:///in/2.csv\n"
        "\tat org.apache.spark.CSVHeaderChecker.check(CSVHeaderChecker.scala:1)\n\t... 25 more\n"
    )
    found = unreadable_file(error)
    assert found is not None and not found.repeats
    assert (
        "found: CSV header does not conform to the schema. Header: b, a Schema: a, b Expected: a but found: b CSV file: "
        "file:///in/2.csv. Write the file again" in found.text
    )
