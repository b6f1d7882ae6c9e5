"""Plain queries with each other kind of state that were killed in the middle of a micro-batch are taken over by pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.spark.plain_programs import PROGRAMS
from tests.spark.processes.test_killed_plain_queries import check_killed_queries

OTHERS = [name for name in PROGRAMS if name not in ("windows", "unmatched")]


@pytest.mark.parametrize("names", [OTHERS[:3], OTHERS[3:]], ids="+".join)
def test_killed_queries_go_on_as_pipelines(lab: Any, names: list[str]) -> None:
    check_killed_queries(lab, names)
