"""A restore with other numbers of instances: what stands in its way, and what a task still knows.

Rows then come to an instance over other channels, and from other instances, than before the checkpoint. Which instance gets which
state is `redistribution`. Must not know: storage, Spark, where the rows of a channel are kept.

Source: PROTOCOL 8.3; Flink's StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec

from dagster_checkpoints.pipeline import ChannelId, TaskId
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.metadata import ChannelSnapshot, TaskSnapshot


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


def check_rescaling(
    checkpoint_id: int, tasks: Mapping[TaskId, TaskSnapshot], ended: Collection[TaskId], rescaled: Collection[str]
) -> None:
    """Refuse a checkpoint that cannot be restored with other numbers of instances.

    Elements in flight belong to the channels that there were. An instance that has finished, or waits after its end of data, does
    not read again: the rows that it would get in the new layout would be lost.

    Args:
        checkpoint_id: id of the checkpoint.
        tasks: by task, its snapshot.
        ended: the tasks that have finished, or wait after their end of data.
        rescaled: the stages whose instances have changed, and are not matched by name.

    Raises:
        InstancesChanged: names the stages, and what stands in the way.
    """
    if not rescaled:
        return
    waiting = sorted({c.channel for task in tasks.values() for c in task.channels if c.in_flight})
    over = sorted(str(task) for task in ended if task.vertex in rescaled)
    if not (waiting or over):
        return
    found = f"elements in flight on {', '.join(waiting)}" if waiting else f"instances that have ended: {', '.join(over)}"
    raise InstancesChanged(
        f"The instances of {', '.join(map(repr, sorted(rescaled)))} have changed, but checkpoint {checkpoint_id} holds "
        f"{found}. These belong to the instances that it was taken with: give the stages the same instances in the same order, "
        "or restore another checkpoint."
    )


def known_channel(
    channel: ChannelId,
    static: bool,
    held: Sequence[Mapping[str, ChannelSnapshot]],
    rescaled: Collection[str],
    origins: Mapping[str, Sequence[int | None]] = MappingProxyType({}),
) -> ChannelSnapshot | None:
    """What a task knows of one of its input channels after the numbers of some instances have changed.

    No element is in flight. The old instances of the stage that reads knew the same of an instance that sends, except with
    at-least-once: the least counts.

    Args:
        channel: the channel, in the new layout.
        static: whether it belongs to a static input.
        held: by old instance of the stage that reads it, the instance's channels by name.
        rescaled: the stages whose instances have changed.
        origins: by stage whose instances are matched by name, the old index of each; None for a new one.

    Returns:
        The channel as restored, at position 0. None if nothing is known of it: the instance that sends is a new one; or it has
        ended, and its end is sent again; or a table has not ended.
    """
    if channel.consumer not in rescaled and channel.producer not in rescaled:
        saved = held[channel.consumer_index].get(str(channel))
        return None if saved is None else msgspec.structs.replace(saved, position=0)
    before = _before(channel, held, rescaled, origins)
    if static:
        # Each old instance had the whole table, and the new one gets it, so the end that one of them knew is known.
        return ChannelSnapshot(str(channel), 0, ended="drain") if any(c.ended in ("drain", "partition") for c in before) else None
    if not before or any(c.ended != "none" for c in before):
        return None  # the producer, or the restore on its behalf, sends the end of a stream again
    return ChannelSnapshot(str(channel), 0, least_watermark(c.watermark for c in before), all(c.idle for c in before))


def _before(
    channel: ChannelId,
    held: Sequence[Mapping[str, ChannelSnapshot]],
    rescaled: Collection[str],
    origins: Mapping[str, Sequence[int | None]],
) -> list[ChannelSnapshot]:
    """The old channels of an input that came from the instance that sends; from any if no old one is the same."""
    sender: int | None = channel.producer_index
    any_sender = False
    if channel.producer in rescaled:
        any_sender = channel.producer not in origins
        sender = None if any_sender else origins[channel.producer][channel.producer_index]
    found = []
    for channels in held:
        for name, saved in channels.items():
            of = ChannelId.parse(name)
            if of.producer == (channel.producer_uid or channel.producer) and (any_sender or of.producer_index == sender):
                found.append(saved)
    return found


def least_watermark(watermarks: Iterable[int | None]) -> int | None:
    """The watermark that every instance of a rescaled job begins with: the earliest of the old instances of its stage.

    Args:
        watermarks: by old instance that had not finished, its watermark, epoch ms; None before the first.

    Returns:
        None if an old instance had none, or there was no such instance: any row may still come.
    """
    known = list(watermarks)
    return None if None in known else min((ms for ms in known if ms is not None), default=None)
