"""What the discovery of files refuses where it is defined."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dagster_checkpoints.files.urls import is_hidden
from dagster_checkpoints.sources import FileSplits, InvalidSource


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FileSplits("/"), "expected a pattern such as"),
        (lambda: FileSplits("s3a://b/day=*/"), "a prefix that ends with a slash and has no wildcards"),
        (lambda: FileSplits("/x", complete="*"), "expected complete to be the name of a file"),
    ],
)
def test_what_is_refused(make: Callable[[], FileSplits], text: str) -> None:
    with pytest.raises(InvalidSource, match=text):
        make()


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("a.parquet", False),
        ("_SUCCESS", True),
        (".a.crc", True),
        ("day=1", False),
        ("_day=1", False),
        (".day=1", True),
        ("a.csv._COPYING_", True),
        ("", False),
        ("day=1/_x=2/a.csv", False),
        ("day=1/_old/a.csv", True),
        (".day=1/a.csv", True),
    ],
)
def test_which_names_spark_leaves_out(name: str, hidden: bool) -> None:
    assert is_hidden(name) is hidden
