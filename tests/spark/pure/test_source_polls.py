"""How often a query asks its sources for rows."""

import pytest

from dagster_checkpoints.files.urls import in_object_store
from dagster_checkpoints.spark.query.query_sessions import polling_delay_ms


@pytest.mark.parametrize(
    ("sources", "remote", "delay"),
    [(0, False, 50), (1, False, 50), (2, False, 50), (3, False, 60), (50, False, 1000), (500, False, 1000), (1, True, 1000)],
)
def test_many_sources_and_object_stores_are_asked_less_often(sources: int, remote: bool, delay: int) -> None:
    assert polling_delay_ms(sources, remote) == delay


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("s3a://bucket/in", True),
        ("S3://bucket/in", True),
        ("gs://bucket/in", True),
        ("abfss://c@account.dfs.core.windows.net/in", True),
        ("hdfs://name/in", False),
        ("file:///in", False),
        ("/in/s3a:/x", False),
        ("in", False),
        ("", False),
    ],
)
def test_which_paths_are_in_an_object_store(path: str, remote: bool) -> None:
    assert in_object_store(path) == remote
