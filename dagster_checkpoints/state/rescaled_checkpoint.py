"""A checkpoint as if it had been taken with the instances that the pipeline has now.

A restore with other instances first makes this checkpoint; every other rule of a restore then applies to it. Instances of
sources, and of stages that read one instance of these each, are matched by **name**: offsets belong to a name. Instances of the
other stages share state and rows: list state is dealt out, keyed state goes to the owners of its key groups. Those that have
ended contribute nothing, and all new ones run. The instances of a split source that read share its splits; the others stay
finished under their names. Must not know: storage, Spark, how keyed state is moved.

Source: PROTOCOL 8.3; Flink's StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from dagster_checkpoints.pipeline import EdgePattern, TaskId
from dagster_checkpoints.state.divided_chains import ChainPart
from dagster_checkpoints.state.ended_instances import EndedReaders, unended
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint, KeyedStateShare, quoted
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.instance_matches import InstanceMatches
from dagster_checkpoints.state.key_groups import default_max_parallelism
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    InputMetadata,
    StageInstanceSnapshot,
    StageMetadata,
    StaticTableSnapshot,
    TaskSnapshot,
)
from dagster_checkpoints.state.rescaled_channels import RescaledChannels, least_watermark, table_reader
from dagster_checkpoints.state.rescaled_instances import (
    dealt_out,
    has_ended,
    holds_state,
    instances_of_finished_ones,
    keyed_state_shares,
    part_of,
    removed_instances,
    with_most_instances,
    with_shared_splits,
    with_transactions,
)
from dagster_checkpoints.state.views import EdgeView


def with_instances(checkpoint: FittedCheckpoint) -> FittedCheckpoint:
    """The checkpoint for the instances that the pipeline has now; a rule.

    Raises:
        InstancesChanged: an instance cannot get what belongs to it; the text names the stage and the remedy.
        ParallelismTooHigh: a stage has more instances than key groups.
    """
    recorded, now = checkpoint.recorded, checkpoint.instances
    moved = frozenset(name for name, stage in recorded.items() if now.get(name, stage.instances) != stage.instances)
    changed = frozenset(name for name in moved if not recorded[name].fully_finished)
    found = replace(
        checkpoint,
        metadata=with_most_instances(checkpoint),
        taken=checkpoint.metadata,
        removed=tuple(removed_instances(checkpoint)),
    )
    if not moved:
        return found
    rescaling = _Rescaling(found, changed, moved)
    metadata = rescaling.metadata()
    removed = (*found.removed, *instances_of_finished_ones(found.metadata, metadata))
    return replace(found, shares=rescaling.shares, removed=removed).changed("rescaled", rescaling.changes(), metadata)


class _Rescaling:
    """One checkpoint, and the stages whose instances have changed: those that run (`changed`), and all (`moved`)."""

    def __init__(self, checkpoint: FittedCheckpoint, changed: frozenset[str], moved: frozenset[str]) -> None:
        self.shares: dict[TaskId, KeyedStateShare] = {}
        self._checkpoint = checkpoint
        self._before = checkpoint.metadata
        self._recorded = checkpoint.recorded
        self._changed = changed
        self._moved = moved
        self._now = checkpoint.instances
        self._inputs_now = recorded_inputs(checkpoint.pipeline)
        self._split_sources = {name for name in changed if self._recorded[name].enumerator is not None}
        self._rerouted = {name: name for name in self._split_sources}
        """By stage whose instances go on, and now read what other ones would have read, the stage with other instances."""
        self._reads = checkpoint.edges_into
        self._matches = InstanceMatches(checkpoint, changed)
        self._channels = RescaledChannels(checkpoint, self._matches, self._key_groups)
        self._where = checkpoint.where

    def changes(self) -> Iterator[str]:
        """In words, what has become of the instances of each chain that runs."""
        for chain in self._before.chains:
            stages = [name for name in chain.stages if name in self._changed]
            if not stages:
                continue
            before, now = self._recorded[stages[0]].instances, self._now[stages[0]]
            if len(before) == len(now):
                yield f"the instances {quoted(before)} of {' -> '.join(stages)} are now {quoted(now)}"
                continue
            splits = ", which share its splits" if stages[0] in self._split_sources else ""
            keyed = ", with the state of their keys" if any(task.vertex == chain.name for task in self.shares) else ""
            yield f"{len(before)} to {len(now)} instances of {' -> '.join(stages)}{splits}{keyed}"

    def metadata(self) -> CheckpointMetadata:
        chains = self._channels.given_to([self._chain(chain) for chain in self._before.chains])
        self._check_event_time(chains)
        stages = tuple(self._stage(stage) for stage in self._before.stages)
        rescaled = msgspec.structs.replace(self._before, stages=stages, chains=chains)
        EndedReaders(self._checkpoint, self._channels.groups, self._matches).check(rescaled, self._moved)
        return rescaled

    # Stages

    def _stage(self, stage: StageMetadata) -> StageMetadata:
        if stage.name not in self._changed:
            return stage
        finished: tuple[int, ...] = ()
        if self._matches.by_name(stage.name):
            finished = tuple(new for new, old in enumerate(self._matches.origins(stage.name)) if old in stage.finished)
        instances = tuple(self._now[stage.name])
        return msgspec.structs.replace(
            stage,
            parallelism=len(instances),
            instances=instances,
            finished=finished,
            inputs=self._inputs(stage),
            max_parallelism=self._key_groups(stage) if self._key(stage.name) else stage.max_parallelism,
        )

    def _inputs(self, stage: StageMetadata) -> tuple[InputMetadata, ...] | None:
        """How the stage reads its inputs. One instance has got, or gets, all rows, whatever distributes them."""
        if stage.inputs is None or (stage.parallelism > 1 and len(self._now[stage.name]) > 1):
            return stage.inputs
        now = {(each.stage, each.mode): each for each in self._inputs_now[stage.name]}
        return tuple(now.get((each.stage, each.mode), each) for each in stage.inputs)

    def _key_groups(self, stage: StageMetadata) -> int:
        """The number of key groups of a stage: that by which its rows were routed."""
        most = stage.parallelism if stage.parallelism > 1 else len(self._now[stage.name])
        return stage.max_parallelism or default_max_parallelism(most)

    def _key(self, stage: str) -> str:
        """The column by which the rows of all streams of a stage are routed; empty if there is no such column.

        With one instance before, it is the present column; otherwise check_inputs compares the two.
        """
        known, now = self._recorded[stage].inputs, self._inputs_now[stage]
        inputs = known if known is not None and self._recorded[stage].parallelism > 1 else now
        keys = {each.key for each in inputs if each.mode == "stream"}
        return keys.pop() if len(keys) == 1 else ""

    # Tasks

    def _chain(self, chain: ChainMetadata) -> tuple[ChainMetadata, Mapping[int, int] | None]:
        """A chain with its present tasks, whose channels are still to be found, and by task the old one whose query it continues.

        None instead of the latter if the channels are those of the checkpoint.
        """
        head = chain.stages[0]
        if any(name not in self._now for name in chain.stages):
            return chain, None
        if head in self._changed:
            self._check_static_tables(chain)
        if not chain.tasks:
            return chain, None
        if len({tuple(self._now[name]) for name in chain.stages}) > 1:
            raise InstancesChanged(
                f"In {self._where} the stages {' -> '.join(chain.stages)} run as one Spark query; now they have different "
                "instances. Give all of them the same ones."
            )
        if head not in self._changed:
            if not any(edge.source in self._moved or edge.source in self._rerouted for edge in self._reads.get(head, ())):
                return chain, None
            self._check_other_producers(chain)
            return chain, {index: index for index in chain.tasks}
        if head in self._split_sources:
            tasks = with_shared_splits(chain, self._matches.origins(head), self._now[head], self._where)
            return msgspec.structs.replace(chain, tasks=tasks), {}
        if self._matches.by_name(head):
            return self._matched(chain)
        return self._dealt_out(chain)

    def _matched(self, chain: ChainMetadata) -> tuple[ChainMetadata, Mapping[int, int]]:
        """A chain whose instances keep what belongs to their names."""
        origins = self._matches.origins(chain.name)
        self._check_none_lost(chain, [old for old in origins if old is not None])
        self._follow(chain, self._rerouted)
        tail, finished = chain.stages[-1], self._recorded[chain.stages[-1]].finished
        tasks, of = {}, {}
        for new, old in enumerate(origins):
            if old in finished:
                continue
            task = chain.tasks[old] if old is not None else _beginning(chain)
            stages = {**task.stages, tail: with_transactions(part_of(task, tail), chain.tasks.get(new), tail)}
            tasks[new] = msgspec.structs.replace(task, stages=stages)
            if old is not None:
                of[new] = old
        return msgspec.structs.replace(chain, tasks=tasks), of

    def _check_none_lost(self, chain: ChainMetadata, kept: Sequence[int]) -> None:
        names = self._recorded[chain.name].instances
        lost = [names[index] for index in sorted(chain.tasks) if index not in kept]
        if lost:
            raise InstancesChanged(
                f"Stage {chain.name!r} has no instance {quoted(lost)} any more; in {self._where} it runs: the "
                "position up to which it has read would be lost. Put it back; or end it first (dagster-checkpoints "
                f"end-source {chain.name} --instance {lost[0]}), and restore a checkpoint after its end."
            )

    def _dealt_out(self, chain: ChainMetadata) -> tuple[ChainMetadata, Mapping[int, int]]:
        """A chain whose instances share state and rows: that of those which have not ended is distributed.

        If all have ended, the new ones wait for their final checkpoint, too.
        """
        parallelism, running = len(self._now[chain.name]), unended(chain)
        old = [chain.tasks.get(index) for index in range(self._recorded[chain.name].parallelism)]
        self._share_keyed_state(chain, running)
        stages = {name: dealt_out(name, old, parallelism) for name in chain.stages}
        tail, tables, tasks, of = chain.stages[-1], _static_tables(chain), {}, {}
        continued = (running or chain.tasks).values()
        for index in range(parallelism):
            share = self.shares.get(TaskId(chain.name, index))
            own = {name: stages[name][index] for name in chain.stages}
            own[tail] = with_transactions(own[tail], chain.tasks.get(index), tail)
            if share is not None:
                of[index] = share.logs
            tasks[index] = TaskSnapshot(
                stages=own,
                query=running[share.logs].query if share else None,
                static=tables,
                end_of_data="none" if running else "drain",
                watermark=least_watermark(task.watermark for task in continued),
                valve_watermark=least_watermark(task.valve_watermark for task in continued),
            )
        return msgspec.structs.replace(chain, tasks=tasks), of

    def _share_keyed_state(self, chain: ChainMetadata, running: Mapping[int, TaskSnapshot]) -> None:
        ran = {index: task.query for index, task in running.items() if task.query is not None and task.query.batch_id >= 0}
        if not ran or not holds_state(chain, list(running.values()), self._where):
            return
        key, before, now = self._key(chain.name), self._recorded[chain.name].parallelism, len(self._now[chain.name])
        if not key:
            raise InstancesChanged(
                f"Stage {chain.name!r} has {now} instances, and {before} in {self._where}. Its state in Spark belongs to the "
                "rows that each instance has got, and no column decides which instance gets a row. Give the stage the same "
                "instances; or distribute its rows by a column of all its inputs (StageInput(key=...)) from a new start on."
            )
        recorded = self._recorded[chain.name]
        whole = bool(recorded.state_partitions)
        old = [running.get(index) for index in range(before)]
        shares = keyed_state_shares(old, ran, now, self._key_groups(recorded), key, whole_partitions=whole)
        self.shares.update({TaskId(chain.name, index): share for index, share in shares.items()})

    # What cannot be right

    def _check_other_producers(self, chain: ChainMetadata) -> None:
        """A stage of several instances, with state, that reads a rescaled one: its rows must still meet their state."""
        if self._recorded[chain.name].parallelism == 1:
            return
        edge = self._follow(chain, {name: name for name in self._changed} | self._rerouted)
        if edge is not None and holds_state(chain, list(chain.tasks.values()), self._where):
            moved = self._rerouted[chain.name]
            raise InstancesChanged(
                f"Stage {moved!r} has other instances than in {self._where}, and the instances of {chain.name!r}, which read "
                f"{edge.source!r} POINTWISE, would get the rows of other ones: their state belongs to the rows that they have "
                f"got. Give {moved!r} the same instances, or start the pipeline without this checkpoint."
            )

    def _follow(self, chain: ChainMetadata, sources: Mapping[str, str]) -> EdgeView | None:
        """Note the stages of a chain as rerouted if it reads one of the sources instance by instance; returns the edge."""
        for edge in self._reads.get(chain.stages[0], ()):
            if edge.source in sources and edge.pattern is EdgePattern.POINTWISE and edge.input.mode == "stream":
                self._rerouted.update(dict.fromkeys(chain.stages, sources[edge.source]))
                return edge
        return None

    def _check_event_time(self, chains: Sequence[ChainMetadata]) -> None:
        """Event time cannot go back: windows have been emitted, and rows in front of it would be dropped as late."""
        running = {TaskId(chain.name, i) for chain in chains for i, task in chain.tasks.items() if not has_ended(task)}
        for chain in (chain for chain in chains if chain.name in self._rerouted):
            if isinstance(chain, ChainPart) and chain.name != chain.whole[0]:
                part, moved = chain.name, self._rerouted[chain.name]
                raise InstancesChanged(
                    f"The pipeline divides the query that {part!r} shares with {chain.whole[0]!r} in {self._where}, and the "
                    f"instances of {moved!r} have changed: those of {part!r} would get rows that other ones would have got, and "
                    "how far each is in event time is not known of a part of a query. Do one after the other: restore with the "
                    f"instances of the checkpoint, take a savepoint after rows have come to {part!r}, and then change the "
                    "instances."
                )
            for index, least in self._channels.behind(chain, running):
                begin = "the beginning" if least is None else f"{least} ms"
                raise InstancesChanged(
                    f"In {self._where} instance {self._now[chain.name][index]!r} of {chain.name!r} is at event time "
                    f"{chain.tasks[index].valve_watermark} ms, and would get rows from {begin} on, which another instance would "
                    f"have got: they would be dropped as late. Give {self._rerouted[chain.name]!r} the instances of the "
                    "checkpoint; or restore one in which all of them are as far."
                )

    def _check_static_tables(self, chain: ChainMetadata) -> None:
        """A new instance needs the rows of static inputs that were read to their end, and only the stage's own state has them."""
        head = chain.stages[0]
        if not self._matches.by_name(head) or None not in self._matches.origins(head) or _static_tables(chain):
            return
        for edge in self._reads.get(head, ()):
            if edge.input.mode == "static" and edge.source in self._recorded and self._recorded[edge.source].finished:
                new = [name for name, old in zip(self._now[head], self._matches.origins(head), strict=True) if old is None]
                raise InstancesChanged(
                    f"Stage {head!r} has the new instance {quoted(new)}, which needs all rows of its static input "
                    f"{edge.source!r}; in {self._where} these were read to their end, and the instances that kept them have "
                    "ended. Put the new instance into a stage of its own, with sources of its own; or begin with it as a new "
                    "start (restore_from: none)."
                )


def _beginning(chain: ChainMetadata) -> TaskSnapshot:
    """The snapshot of a new instance, which begins with the static inputs of the others: each instance gets all their rows."""
    return TaskSnapshot({name: StageInstanceSnapshot(rows_out=0) for name in chain.stages}, static=_static_tables(chain))


def _static_tables(chain: ChainMetadata) -> tuple[StaticTableSnapshot, ...]:
    """The static inputs that a new instance begins with: those of an old one."""
    reader = table_reader(chain.tasks)
    return () if reader is None else chain.tasks[reader].static
