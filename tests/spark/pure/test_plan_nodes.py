"""What a stage's plan has more than its inputs, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.spark.query.plan_nodes import added


@pytest.mark.parametrize(
    ("plan", "inputs", "expected"),
    [
        ("a", [], "a"),
        ("ab", ["b"], "a"),
        ("ba", ["b"], "a"),
        ("abc", ["c", "a"], "b"),
        ("bb", ["b"], "b"),
        ("b", ["b"], ""),
        ("", ["b"], ""),
        ("x", ["b"], ""),
        ("ax", ["b"], "a"),
    ],
    ids=str,
)
def test_what_belongs_to_an_input_is_not_the_stages(plan: str, inputs: Sequence[str], expected: str) -> None:
    """With `x` the optimizer has written what an input has in another way: then the number alone tells."""

    def frame(found: str, *, streaming: bool = True) -> Any:
        return SimpleNamespace(found=list(found), isStreaming=streaming)

    given = [frame(each) for each in inputs]
    table = frame("ab", streaming=False)
    assert "".join(added(lambda each: each.found, frame(plan), [table, *given])) == expected
