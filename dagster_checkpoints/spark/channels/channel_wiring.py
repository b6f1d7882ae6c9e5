"""The channels of one attempt, opened: the inputs and outputs of its tasks, and the first elements of restored channels.

Which channels there are is `pipeline.channels`; what a restored one begins with is `execution.input_channel`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_checkpoints.execution.input_channel import first_elements
from dagster_checkpoints.pipeline import Chain, ChannelGroup, Pipeline, TaskId, channel_groups
from dagster_checkpoints.spark.channels.channel_log import Channel, Records, SegmentFiles
from dagster_checkpoints.spark.channels.outputs import OutputEdge
from dagster_checkpoints.spark.channels.segments import Split, write_share
from dagster_checkpoints.spark.files.work_path import WorkFolder, WorkPath
from dagster_checkpoints.state.metadata import Segment, StateFile, TaskSnapshot
from dagster_checkpoints.state.rescaled_channels import SegmentShare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Wiring:
    """Opens the channels between chains, except those to tasks that do not run again.

    Args:
        pipeline: The pipeline.
        chains: The chains of the attempt.
        snapshots: The snapshots of the restored tasks: a channel starts at its consumer's position.
        finished: The tasks that do not run again: their output channels have ended.
        key_groups: By stage, its number of key groups.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        chains: Sequence[Chain],
        snapshots: Mapping[TaskId, TaskSnapshot],
        finished: frozenset[TaskId],
        key_groups: Mapping[str, int],
    ) -> None:
        self._finished = finished
        self._inputs: dict[TaskId, list[tuple[TaskId, Channel]]] = defaultdict(list)
        """By consumer, its channels with their producers."""
        self._outputs: dict[TaskId, list[OutputEdge]] = defaultdict(list)
        positions = {c.channel: c.position for snapshot in snapshots.values() for c in snapshot.channels}
        for group in channel_groups(pipeline, chains):
            opened = []
            for consumer, identity in group.channels.items():
                if consumer not in finished:
                    opened.append(Channel(identity, positions.get(str(identity), 0)))
                    self._inputs[consumer].append((group.producer, opened[-1]))
            if opened:
                self._outputs[group.producer].append(_output_edge(group, tuple(opened), key_groups[group.edge.target]))

    def into(self, consumer: TaskId, input_name: str) -> tuple[Channel, ...]:
        """The channels of one input of a task."""
        return tuple(channel for _, channel in self._inputs[consumer] if channel.id.producer == input_name)

    def outputs(self, producer: TaskId) -> list[OutputEdge]:
        """The output edges of a task."""
        return self._outputs[producer]

    def restore_in_flight(
        self,
        task: TaskId,
        snapshot: TaskSnapshot | None,
        folder: WorkFolder,
        fetch: Callable[[Sequence[StateFile], WorkFolder], WorkPath],
        rows: Callable[[str, Sequence[WorkPath]], DataFrame],
    ) -> None:
        """Append to the task's input channels what they begin with: elements in flight, and the end after a finished producer.

        Args:
            task: The task.
            snapshot: The snapshot from which it is restored; None for a new start.
            folder: The task's directory.
            fetch: Fetches files of the checkpoint below a directory, and returns that.
            rows: Reads files with rows of a stage.
        """
        saved = {c.channel: c.in_flight for c in snapshot.channels} if snapshot else {}
        folders = (folder.work / "shares" / f"{number:06d}" for number in itertools.count())
        for producer, channel in self._inputs[task]:
            elements = first_elements(saved.get(str(channel.id), ()), producer in self._finished)
            files = [f for e in elements if isinstance(e, Segment) for f in e.files]
            root = fetch(files, folder) if files else folder.work
            for element in elements:
                if isinstance(element, SegmentShare):
                    whole = restored_segment(element, root)
                    share = write_share(rows(channel.id.producer, whole.files), next(folders), element)
                    whole.release()
                    if share is not None:
                        channel.append(Records(share))
                else:
                    channel.append(Records(restored_segment(element, root)) if isinstance(element, Segment) else element)

    def close(self) -> None:
        for inputs in self._inputs.values():
            for _, channel in inputs:
                channel.close()


def _output_edge(group: ChannelGroup, channels: tuple[Channel, ...], key_groups: int) -> OutputEdge:
    split = None
    if not group.static and len(channels) > 1:
        split = Split(len(channels), group.key, key_groups)
    return OutputEdge(group.edge.target, channels, split, group.static, group.edge.refused)


def restored_segment(segment: Segment, root: WorkPath) -> SegmentFiles:
    """A segment of a checkpoint whose files were fetched below `root`."""
    files = tuple(root / file.path for file in segment.files)
    restored = SegmentFiles(files, segment.rows, tuple(file.size for file in segment.files))
    restored.hold()
    return restored
