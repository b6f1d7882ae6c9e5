"""Jobs that are killed at any moment, over the sinks and settings whose other tests of the suite stand in the folder above.

`make test` kills jobs over ParquetSink and over files in S3, and a few cells of the crash matrix; these share their engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.postgresql import PostgresqlServer
from dagster_checkpoints.testing import SinkConformance
from tests.sinks import (
    test_delta_conformance,
    test_file_conformance,
    test_iceberg_conformance,
    test_own_sink_page,
    test_sink_conformance,
    test_sql_conformance,
)

KILLED = "test_a_job_that_is_killed_at_any_moment"
MODULES = (
    test_delta_conformance,
    test_file_conformance,
    test_iceberg_conformance,
    test_sink_conformance,
    test_sql_conformance,
)
SUITES = [
    suite
    for module in MODULES
    for name, suite in vars(module).items()
    if name.startswith("Test") and getattr(suite, KILLED) is None
]
ON_POSTGRESQL = [suite for suite in SUITES if issubclass(suite, test_sql_conformance.PostgresqlRows)]


@pytest.mark.parametrize("suite", [suite for suite in SUITES if suite not in ON_POSTGRESQL])
def test_a_job_that_is_killed_at_any_moment(suite: type[SinkConformance], tmp_path: Path) -> None:
    SinkConformance.test_a_job_that_is_killed_at_any_moment(suite(), tmp_path)


@pytest.mark.parametrize("suite", ON_POSTGRESQL)
def test_a_job_over_postgresql_that_is_killed_at_any_moment(
    suite: type[SinkConformance], tmp_path: Path, postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(test_sql_conformance.URL, postgresql.url())
    SinkConformance.test_a_job_that_is_killed_at_any_moment(suite(), tmp_path)


def test_every_suite_kills_jobs_here_or_in_its_own_file() -> None:
    assert len(SUITES) == 20


@pytest.mark.parametrize("kind", ["the whole contract", "a target"])
def test_the_sink_of_the_page_survives_kills(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, test = test_own_sink_page.PAGES[kind]
    suite = test_own_sink_page.suite_of(tmp_path, sink, monkeypatch, test)
    suite.test_a_job_that_is_killed_at_any_moment(tmp_path)


def test_a_commit_that_deletes_before_it_writes_is_found_by_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = test_own_sink_page
    old = "os.replace(staged, target)"
    assert page.SINK.count(old) == 1
    broken = page.SINK.replace(old, "text = staged.read_text(); staged.unlink(); target.write_text(text)")
    suite = page.suite_of(tmp_path, broken, monkeypatch)
    assert page.first_failure(suite, tmp_path) is None
    with pytest.raises(AssertionError, match="killed in commit"):
        suite.test_a_job_that_is_killed_at_any_moment(tmp_path)
