"""Which tasks are just finishing, as rows of events, and the plan after a restart: without a coordinator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint, TaskStatistics
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.plan import CheckpointPlan, NotAllRunning, TaskState
from dagster_checkpoints.coordination.progress import Obstacle, TaskProgress
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId

TASKS = {"A": TaskId("V0", 0), "B": TaskId("V1", 0)}


def after(graph: ExecutionGraph, events: str) -> TaskProgress:
    """Two tasks that run, and then, e.g. ``cA +5 A. x``: a checkpoint completes that A alone took after its finish(), five
    seconds pass, A is FINISHED, tasks past the timeout no longer count."""
    progress = TaskProgress(graph, CheckpointConfig(interval=10.0, timeout=60.0), ())
    for task in TASKS.values():
        progress.changed(task, TaskState.RUNNING)
    now = 0.0
    for word in events.split():
        if word[0] == "+":
            now += float(word)
        elif word[0] == "c":
            measured = {task: TaskStatistics(operators_finished=name in word) for name, task in TASKS.items()}
            progress.final_checkpoint_completed(CompletedCheckpoint(1, "chk-1", statistics=measured), now)
        elif word == "x":
            progress.expire_finishing(now)
        else:
            progress.changed(TASKS[word[0]], {".": TaskState.FINISHED, "!": TaskState.FAILED}[word[1]])
    return progress


@pytest.mark.parametrize(
    ("events", "waited_for_until"),
    [
        ("", None),
        ("cA", 60),
        ("cAB", 60),
        # No task took it after its finish().
        ("c", None),
        # Until the last of them has finished or failed.
        ("cA A.", None),
        ("cA A!", None),
        ("cA B!", 60),
        ("cAB A.", 60),
        ("cAB A. B.", None),
        # A task that has ended before does not count.
        ("A. cA", None),
        ("A! cAB", 60),
        # A second final checkpoint adds to the first, and restarts the timeout for all.
        ("+1 cA +5 cB", 66),
        ("+1 cA +5 cB A.", 66),
        ("+1 cA +5 cB B.", 66),
        ("+1 cA +5 c", 66),
        # Until the timeout.
        ("x", None),
        ("+1 cA +59 x", 61),
        ("+1 cA +60 x", None),
        ("+1 cA +70 x", None),
        ("+1 cA +70 x cB", 131),
    ],
)
def test_which_tasks_are_just_finishing(
    graph_of: Callable[[str], ExecutionGraph], events: str, waited_for_until: float | None
) -> None:
    progress = after(graph_of("V0 p1; V1 p1"), events)
    assert progress.any_finishing == (waited_for_until is not None)
    assert progress.finishing_expires_at == waited_for_until


def test_a_restart_forgets_the_plan_of_the_tasks_that_ran(graph_of: Callable[[str], ExecutionGraph]) -> None:
    progress = after(graph_of("V0 p1; V1 p1"), "")
    assert isinstance(progress.plan_or_obstacle(), CheckpointPlan)
    progress.reset(())
    assert isinstance(progress.plan(), NotAllRunning)
    assert isinstance(progress.plan_or_obstacle(), Obstacle)
    progress.reset(TASKS.values())
    assert progress.plan_or_obstacle() == Obstacle("every task has finished")
