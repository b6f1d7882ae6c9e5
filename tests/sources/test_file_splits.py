"""What the discovery of files refuses where it is defined."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
