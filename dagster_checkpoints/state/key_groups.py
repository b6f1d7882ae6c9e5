"""Key groups: the unit in which keyed state moves between instances. Rows are routed by them.

A key always belongs to the same one of G groups; an instance owns a range of groups. G is the maximum parallelism: it is fixed
with the first checkpoint, because another G would put the keys into other groups. Must not know: keys, how they are hashed.

A stage may have key groups that *are* its state partitions (`state_partitions`). An engine puts a key with hash h into group
h mod G, and inside an instance with P partitions into partition h mod P. If each of N instances has P = G / N partitions, its
range of groups begins at a multiple of P, so that its partition p holds exactly the p-th group of its range: other instances take
whole partitions.

Source: Flink's KeyGroupRangeAssignment, StateAssignmentOperation.checkParallelismPreconditions.
"""

from __future__ import annotations

from dataclasses import replace

from dagster_checkpoints.state.errors import (
    InvalidMaxParallelism,
    MaxParallelismChanged,
    ParallelismTooHigh,
    StatePartitionsChanged,
)
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint

LOWEST_DEFAULT = 128
HIGHEST_MAX_PARALLELISM = 32768


def default_max_parallelism(parallelism: int) -> int:
    """The number of key groups if the user has set none: 1.5 times the parallelism, as the next power of two in 128..32768."""
    wanted = parallelism + parallelism // 2
    return min(max(1 << (wanted - 1).bit_length(), LOWEST_DEFAULT), HIGHEST_MAX_PARALLELISM)


def key_groups_of(index: int, parallelism: int, groups: int) -> range:
    """The groups that an instance owns: at least one, unless there are more instances than groups."""
    first = (index * groups + parallelism - 1) // parallelism
    last = ((index + 1) * groups - 1) // parallelism
    return range(first, last + 1)


def owner_of(group: int, parallelism: int, groups: int) -> int:
    """The instance that owns a group."""
    return group * parallelism // groups


def chosen_max_parallelism(stage: str, parallelism: int, chosen: int | None, recorded: int) -> int:
    """The number of key groups of a stage.

    Args:
        stage: name of the stage, for the errors.
        parallelism: number of its instances.
        chosen: the value that the user has set; None to derive it.
        recorded: the value in the restored checkpoint; 0 without one.

    Raises:
        InvalidMaxParallelism: the value that the user has set is out of range.
        MaxParallelismChanged: it differs from that of the checkpoint.
        ParallelismTooHigh: there are more instances than key groups.
    """
    if chosen is not None and not 1 <= chosen <= HIGHEST_MAX_PARALLELISM:
        raise InvalidMaxParallelism(
            f"Stage {stage!r} sets max_parallelism={chosen}; expected 1 to {HIGHEST_MAX_PARALLELISM}. Choose a number that its "
            "instances will never exceed: it cannot be changed later without losing the state."
        )
    if recorded and chosen not in (None, recorded):
        raise MaxParallelismChanged(
            f"Stage {stage!r} sets max_parallelism={chosen}, and the checkpoint was taken with {recorded}, by which its keys "
            f"were grouped. Set max_parallelism={recorded}, leave it out, or start the pipeline without this checkpoint."
        )
    groups = recorded or chosen or default_max_parallelism(parallelism)
    if parallelism > groups:
        remedy = "Start without this checkpoint" if recorded else "Set a higher one" if chosen else "Split the stage"
        raise ParallelismTooHigh(
            f"Stage {stage!r} has {parallelism} instances and a maximum parallelism of {groups}: some would own no keys. "
            f"{remedy}, or give the stage at most {groups} instances."
        )
    return groups


def partition_of(group: int, parallelism: int, groups: int) -> int:
    """The state partition of the group's owner that holds exactly this group, where key groups are state partitions."""
    return group % (groups // parallelism)


def check_state_partitions(checkpoint: FittedCheckpoint) -> None:
    """Check that the number of state partitions that stages declare is that of the checkpoint, whose state is divided by it.

    A stage that has fully finished has no state. A rule of a restore.

    Raises:
        StatePartitionsChanged: names the stage, the number in the checkpoint and the present one.
    """
    for stage in checkpoint.pipeline.stages:
        known = checkpoint.recorded.get(stage.name)
        now = stage.state_partitions or 0
        if known is None or known.fully_finished or known.state_partitions == now:
            continue
        remedy = f"Set state_partitions={known.state_partitions}" if known.state_partitions else "Leave out state_partitions"
        raise StatePartitionsChanged(
            f"Stage {stage.name!r} has {_number(now)}, and {_number(known.state_partitions)} in {checkpoint.where}: its "
            f"rows would go to other instances than the state of their keys. {remedy}; or end the old pipeline with a drain, "
            "which emits and commits all that it holds, and begin with the new number as a new start (restore_from: none)."
        )


def with_key_groups(checkpoint: FittedCheckpoint) -> FittedCheckpoint:
    """The checkpoint with the number of key groups of each stage that runs; a rule of a restore.

    A fully finished stage has no keyed state, so its number may change.

    Raises:
        InvalidMaxParallelism, MaxParallelismChanged, ParallelismTooHigh: see `chosen_max_parallelism`.
    """
    found = {}
    for stage in checkpoint.pipeline.stages:
        known = checkpoint.recorded.get(stage.name)
        if known is None or not known.fully_finished:
            chosen = stage.state_partitions or checkpoint.max_parallelism.get(stage.name)
            fixed = known.max_parallelism if known is not None else 0
            found[stage.name] = chosen_max_parallelism(stage.name, len(stage.instances), chosen, fixed)
    return replace(checkpoint, max_parallelism=found)


def _number(partitions: int) -> str:
    return f"state_partitions={partitions}" if partitions else "no state_partitions"
