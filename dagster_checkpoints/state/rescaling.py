"""A restore with other numbers of instances: what stands in its way, and what a task still knows; no run on Spark reaches it yet.

Rows then come to an instance over other channels, and from other instances, than before the checkpoint. Which instance gets which
state is `redistribution`. Must not know: storage, Spark, where the rows of a channel are kept.

Source: PROTOCOL 8.3; Flink's StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dagster_checkpoints.pipeline import ChannelId
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.metadata import ChannelSnapshot
from dagster_checkpoints.state.restore import RestorePlan
from dagster_checkpoints.state.views import StageView


def rescaled_stages(before: Iterable[StageView], after: Iterable[StageView]) -> frozenset[str]:
    """The names of the stages whose instances have changed; a stage that is only in one of the two is none of them.

    Args:
        before: the stages as the checkpoint recorded them.
        after: the stages of the pipeline that is to run.
    """
    recorded = {stage.name: stage.instances for stage in before}
    return frozenset(stage.name for stage in after if recorded.get(stage.name, stage.instances) != stage.instances)


def check_rescaling(plan: RestorePlan, rescaled: Collection[str]) -> None:
    """Refuse a checkpoint that cannot be restored with other numbers of instances.

    Elements in flight belong to the channels that there were. An instance that has finished, or waits after its end of data, does
    not read again: the rows that it would get in the new layout would be lost.

    Args:
        plan: the plan of the restore, as if no number had changed.
        rescaled: the stages whose instances have changed.

    Raises:
        InstancesChanged: names the stages, and what stands in the way.
    """
    if not rescaled:
        return
    waiting = sorted({c.channel for task in plan.tasks.values() for c in task.channels if c.in_flight})
    ended = sorted(str(task) for task in plan.finished | plan.after_finish if task.vertex in rescaled)
    if not (waiting or ended):
        return
    found = f"elements in flight on {', '.join(waiting)}" if waiting else f"instances that have ended: {', '.join(ended)}"
    raise InstancesChanged(
        f"The instances of {', '.join(map(repr, sorted(rescaled)))} have changed, but checkpoint {plan.checkpoint_id} holds "
        f"{found}. These belong to the instances that it was taken with: give the stages the same instances in the same order, "
        "or restore another checkpoint."
    )


def known_channel(
    channel: ChannelId, static: bool, held: Sequence[Mapping[str, ChannelSnapshot]], rescaled: Collection[str]
) -> ChannelSnapshot | None:
    """What a task knows of one of its input channels after the numbers of some instances have changed.

    At most how the channel has ended: its rows come from other places now, so nothing is known of its event time.

    Args:
        channel: the channel, in the new layout.
        static: whether it belongs to a static input.
        held: by old instance of the stage that reads it, the instance's channels by name.
        rescaled: the stages whose instances have changed.

    Returns:
        The channel as restored. None if it is new to the task: the stage that sends has other instances, or the stage that reads
        has, and no old instance knew the end of the static input.
    """
    if channel.producer in rescaled:
        return None
    if channel.consumer not in rescaled:
        saved = held[channel.consumer_index].get(str(channel))
        return None if saved is None else ChannelSnapshot(str(channel), 0, ended=saved.ended)
    if not static:
        return None  # the producer, or the restore on its behalf, sends the end of a stream again
    # Each old instance had the whole table, and the new one gets it, so the end that one of them knew is known.
    names = [str(ChannelId(channel.producer, channel.producer_index, channel.consumer, index)) for index in range(len(held))]
    ended = any(name in known and known[name].ended in ("drain", "partition") for name, known in zip(names, held, strict=True))
    return ChannelSnapshot(str(channel), 0, ended="drain") if ended else None


def least_watermark(watermarks: Iterable[int | None]) -> int | None:
    """The watermark that every instance of a rescaled job begins with: the earliest of the old instances of its stage.

    Args:
        watermarks: by old instance that had not finished, its watermark, epoch ms; None before the first.

    Returns:
        None if an old instance had none, or there was no such instance: any row may still come.
    """
    known = list(watermarks)
    return None if None in known else min((ms for ms in known if ms is not None), default=None)
