"""The initial state of a processor, behind its first micro-batch: it moves to other instances, and is not read again."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.spark.errors import PlanRefusedError
from tests.spark.conftest import Lab
from tests.spark.test_initial_state import INITIAL, ROWS, TOTALS, pipeline


@pytest.mark.parametrize("options", [{}, {"state_partitions": 4}])
def test_the_initial_state_moves_to_other_instances_and_is_not_read_again(lab: Lab, options: dict[str, Any]) -> None:
    """Of four instances some get no key: they begin without a row of state."""
    lab.put("former", TOTALS, INITIAL)
    empty = lab.start(pipeline(lab, ["x"], **options), interval=None)
    assert empty.done("savepoint") and empty.done("stop")
    empty.finished()
    refused = lab.start(pipeline(lab, ["w", "x", "y", "z"], **options), interval=None).result().error
    assert type(refused) is PlanRefusedError and "has 4 instances" in str(refused), refused

    first = lab.start(pipeline(lab, ["x"], **options), interval=None)
    lab.put("in", ROWS, [(k, lab.at(60), k) for k in (1, 3)])
    first.wait_until(lambda: first.execution.rows().get("rows") == 2)
    first.done("stop")
    first.finished()

    second = lab.start(pipeline(lab, ["w", "x", "y", "z"], **options), interval=None)
    lab.put("in", ROWS, [(k, lab.at(120), 10 * k) for k in (1, 2)])
    second.wait_until(lambda: second.execution.rows().get("rows") == 4)
    second.drain()
    second.finished()
    lab.check([(1, 1011), (2, 2020), (3, 3), (7, 7000)])
