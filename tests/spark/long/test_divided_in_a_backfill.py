"""Each change of a pipeline whose sources are fused, from a savepoint in the middle of the backfill."""

from __future__ import annotations

from typing import Any

from tests.spark.test_divided_fused_sources import check_each_change


def test_each_change_divides_the_query_before_a_source_has_ended(lab: Any) -> None:
    check_each_change(lab, ended=False)
