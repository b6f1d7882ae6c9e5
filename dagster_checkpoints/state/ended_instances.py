"""Which restores with other instances would send rows to an instance, or to keys, that have ended.

All new instances of a stage whose instances share rows run, also where old ones have ended: they get the rows and the state of
those that had not. So no row may come whose state was left behind with an instance that has ended, and the instances of other
stages that have ended do not read again. Must not know: storage, Spark.

Source: PROTOCOL 8.1; Flink's VertexFinishedStateChecker.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from dagster_checkpoints.pipeline import ChannelGroup, ChannelId, EdgePattern, TaskId
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint, quoted
from dagster_checkpoints.state.instance_matches import InstanceMatches
from dagster_checkpoints.state.metadata import ChainMetadata, ChannelSnapshot, CheckpointMetadata, EndOfData, TaskSnapshot
from dagster_checkpoints.state.rescaled_instances import has_ended


class EndedReaders:
    """The instances that read in a checkpoint, and those of them that had read everything.

    Args:
        checkpoint: the checkpoint as it was taken, with the pipeline that is to run.
        groups: the present channels.
        matches: which present instances are which old ones.
    """

    def __init__(self, checkpoint: FittedCheckpoint, groups: Sequence[ChannelGroup], matches: InstanceMatches) -> None:
        self._chains = {chain.name: chain for chain in checkpoint.metadata.chains}
        self._instances = {name: stage.instances for name, stage in checkpoint.recorded.items()}
        self._groups = groups
        self._streams: dict[str, set[str]] = {}
        """By stage that reads, the uids of those whose streams it reads."""
        for group in groups:
            for reader, channel in group.channels.items() if not group.static else ():
                self._streams.setdefault(reader.vertex, set()).add(ChannelId.parse(str(channel)).producer)
        self._matches = matches
        self._where = checkpoint.where

    def check(self, rescaled: CheckpointMetadata, moved: Collection[str]) -> None:
        """Refuse rows to instances that have ended, and to keys whose state an instance that has ended left behind.

        Args:
            rescaled: the checkpoint with the present instances.
            moved: the stages whose instances have changed.

        Raises:
            InstancesChanged: names the instance that would send, and the one that has ended.
        """
        emits = {TaskId(chain.name, i) for chain in rescaled.chains for i, task in chain.tasks.items() if not has_ended(task)}
        for group in self._groups:
            if group.producer not in emits:
                continue
            by_other = group.producer.vertex in moved
            for reader in group.channels:
                if reader.vertex not in self._chains:
                    continue
                if reader not in emits or (by_other and not group.static and self._has_read_all(reader)):
                    raise InstancesChanged(
                        f"Instance {group.producer.index} of {group.producer.vertex!r} would send its rows to {reader}, which "
                        f"has finished in {self._where}, or has reached the end of all its inputs. Give the stages the instances "
                        "of the checkpoint; or restore another checkpoint."
                    )
            self._check_keys(group)

    def _check_keys(self, group: ChannelGroup) -> None:
        """Where each instance may get each row, no instance may have ended before all rows are there."""
        name = next(iter(group.channels)).vertex
        if name not in self._chains or group.edge.pattern is not EdgePattern.ALL_TO_ALL or not self._matches.of(name).shares_rows:
            return
        chain = self._chains[name]
        over = has_ended if group.static else partial(self._is_over, name)
        ended = [index for index in range(len(self._instances[name])) if over(chain.tasks.get(index))]
        if ended:
            names = quoted(self._instances[name][index] for index in ended)
            raise InstancesChanged(
                f"Instance {group.producer.index} of {group.producer.vertex!r} would send rows to {name!r}, of which the "
                f"instances {names} have ended in {self._where}, or have read all their inputs: they have emitted results that "
                f"these rows would change. Give {group.producer.vertex!r} the instances of the checkpoint; or read the new rows "
                "through a source of another name, with stages of its own."
            )

    def _has_read_all(self, reader: TaskId) -> bool:
        """Whether all inputs of a present instance had ended in the checkpoint: its event time has ended as well."""
        chain, match = self._chains[reader.vertex], self._matches.of(reader.vertex)
        if match.shares_rows:
            return all(self._is_over(chain.name, chain.tasks.get(index)) for index in range(match.before))
        origin = match.origins[reader.index]
        return origin is not None and self._is_over(chain.name, chain.tasks.get(origin))

    def _is_over(self, stage: str, task: TaskSnapshot | None) -> bool:
        """Whether an instance has ended, or has reached the end of all its streams."""
        if task is None or has_ended(task):
            return True
        streams = [c for c in task.channels if ChannelId.parse(c.channel).producer in self._streams.get(stage, ())]
        return bool(streams) and all(channel.ended != "none" or _only_end_in_flight(channel) for channel in streams)


def _only_end_in_flight(channel: ChannelSnapshot) -> bool:
    """Whether a barrier has overtaken the end of a channel, but not the end of event time in front of it."""
    return bool(channel.in_flight) and all(isinstance(element, EndOfData) for element in channel.in_flight)


def unended(chain: ChainMetadata) -> dict[int, TaskSnapshot]:
    """The instances of a recorded chain that had not ended, by index."""
    return {index: task for index, task in chain.tasks.items() if not has_ended(task)}
