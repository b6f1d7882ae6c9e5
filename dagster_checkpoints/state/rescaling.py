"""A restore with other numbers of instances: which stages are concerned, and the earliest event time.

Which instance gets which state is `redistribution`; what channels begin with is `rescaled_channels`. Must not know: storage,
Spark.

Source: PROTOCOL 8.3; Flink's StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


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


def least_watermark(watermarks: Iterable[int | None]) -> int | None:
    """The watermark that every instance of a rescaled job begins with: the earliest of the old instances of its stage.

    Args:
        watermarks: by old instance that had not ended, its watermark, epoch ms; None before the first.

    Returns:
        None if an old instance had none, or there was no such instance: any row may still come.
    """
    known = list(watermarks)
    return None if None in known else min((ms for ms in known if ms is not None), default=None)
