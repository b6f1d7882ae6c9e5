"""A restore with other numbers of instances: which stages are concerned, what stands in its way, and the earliest event time.

Which instance gets which state is `redistribution`; what channels begin with is `rescaled_channels`. Must not know: storage,
Spark.

Source: PROTOCOL 8.3; Flink's StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.errors import InstancesChanged


class InstancesOf(Protocol):
    """A stage, recorded or present, with its instances."""

    @property
    def name(self) -> str: ...
    @property
    def instances(self) -> tuple[str, ...]: ...


def rescaled_stages(before: Iterable[InstancesOf], after: Iterable[InstancesOf]) -> frozenset[str]:
    """The names of the stages whose instances have changed; a stage that is only in one of the two is none of them.

    Args:
        before: the stages as the checkpoint recorded them.
        after: the stages of the pipeline that is to run.
    """
    recorded = {stage.name: stage.instances for stage in before}
    return frozenset(stage.name for stage in after if recorded.get(stage.name, stage.instances) != stage.instances)


def check_rescaling(checkpoint_id: int, ended: Collection[TaskId], rescaled: Collection[str]) -> None:
    """Refuse a checkpoint that cannot be restored with other numbers of instances.

    An instance that has finished, or waits after its end of data, does not read again: the rows that it would get in the new
    layout would be lost.

    Args:
        checkpoint_id: id of the checkpoint.
        ended: the tasks that have finished, or wait after their end of data.
        rescaled: the stages whose instances have changed, and are not matched by name.

    Raises:
        InstancesChanged: names the stages, and the instances.
    """
    over = sorted(str(task) for task in ended if task.vertex in rescaled)
    if over:
        raise InstancesChanged(
            f"The instances of {', '.join(map(repr, sorted(rescaled)))} have changed, but checkpoint {checkpoint_id} holds "
            f"instances that have ended: {', '.join(over)}. They belong to the instances that it was taken with: give the stages "
            "the same instances in the same order, or restore another checkpoint."
        )


def least_watermark(watermarks: Iterable[int | None]) -> int | None:
    """The watermark that every instance of a rescaled job begins with: the earliest of the old instances of its stage.

    Args:
        watermarks: by old instance that had not finished, its watermark, epoch ms; None before the first.

    Returns:
        None if an old instance had none, or there was no such instance: any row may still come.
    """
    known = list(watermarks)
    return None if None in known else min((ms for ms in known if ms is not None), default=None)
