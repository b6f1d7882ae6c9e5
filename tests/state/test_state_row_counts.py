"""The rows that a checkpoint records of a stage: also of a release that did not count rows inside a query."""

from __future__ import annotations

import pytest

from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    FusedSourceSnapshot,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.rescaled_instances import dealt_out
from dagster_checkpoints.state.row_counts import rows_in_snapshot, rows_of_finished, rows_of_stage


def recorded(
    rows: int | None, held: list[int | None], finished: tuple[int, ...] = (), *, tail: bool = False
) -> CheckpointMetadata:
    """A checkpoint of the chain "read > written" with the numbers of one of the two stages."""
    instances = tuple(str(number) for number in range(len(held) + len(finished)))
    tasks = {
        number: TaskSnapshot({"read": StageInstanceSnapshot(rows_out=count), "written": StageInstanceSnapshot(rows_out=count)})
        for number, count in zip((n for n in range(len(instances)) if n not in finished), held, strict=True)
    }
    over = not held
    stages = tuple(StageMetadata(name, len(instances), instances, finished, over, rows=rows) for name in ("read", "written"))
    return CheckpointMetadata("p", 1, stages, (ChainMetadata("read", ("read", "written"), tasks),))


@pytest.mark.parametrize(
    ("rows", "held", "finished", "inside", "last"),
    [
        (7, [7], (), 0, 0),
        (9, [4], (1,), 5, 5),
        (0, [0], (), 0, 0),
        (6, [], (0,), 6, 6),
        (None, [None], (), 0, 0),  # an earlier release: the stage inside the query may have emitted rows
        (None, [None], (1,), None, 0),
        (None, [], (0,), None, 0),
    ],
)
def test_what_finished_instances_have_emitted(
    rows: int | None, held: list[int | None], finished: tuple[int, ...], inside: int | None, last: int
) -> None:
    found = rows_of_finished(recorded(rows, held, finished))
    assert (found.get("read", 0), found.get("written", 0)) == (inside, last)


def test_a_number_that_was_not_recorded_is_unknown_inside_a_query_and_0_at_its_end() -> None:
    earlier, now = recorded(None, [None]), recorded(0, [0])
    assert [rows_of_stage(earlier, stage) for stage in earlier.stages] == [None, 0]
    assert [rows_of_stage(now, stage) for stage in now.stages] == [0, 0]
    task = earlier.chains[0].tasks[0]
    assert (rows_in_snapshot(task, "read"), rows_in_snapshot(task, "written"), rows_in_snapshot(task, "new")) == (None, 0, 0)
    fused = TaskSnapshot(task.stages, fused=(FusedSourceSnapshot("read", 0),))
    assert rows_in_snapshot(fused, "read") == 0, "an earlier release counted the rows of fused sources"


def test_rows_of_instances_that_are_gone_are_added_also_if_one_had_none_in_an_earlier_release() -> None:
    held = [*recorded(None, [5, None, 2]).chains[0].tasks.values(), None]
    assert [part.rows_out for part in dealt_out("written", held, 2)] == [7, 0]
    assert [part.rows_out for part in dealt_out("read", held, 2)] == [7, None]
    assert [part.rows_out for part in dealt_out("written", held, 5)] == [5, 0, 2, 0, 0]
