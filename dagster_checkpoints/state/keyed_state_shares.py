"""The keyed state that each instance of a rescaled stage begins with: which key groups, from which old instances.

Must not know: storage, Spark, how keyed state is moved.

Source: PROTOCOL 8.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagster_checkpoints.state.key_groups import key_groups_of
from dagster_checkpoints.state.metadata import QuerySnapshot, TaskSnapshot


@dataclass(frozen=True, slots=True)
class KeyedStateShare:
    """The keyed state with which an instance of a rescaled stage begins.

    Attributes:
        groups: the key groups that the instance owns.
        number: the number of all key groups.
        key: the column of the inputs by which rows were routed to the instances, or are now.
        logs: the old instance whose query the instance continues.
        queries: by old instance that held some of these groups, its query.
        held: by old instance, the key groups that it owned.
        whole_partitions: whether each key group is a state partition, so that state can be moved by partition, not row by row.
    """

    groups: range
    number: int
    key: str
    logs: int
    queries: Mapping[int, QuerySnapshot]
    held: Mapping[int, range]
    whole_partitions: bool = False


def keyed_state_shares(
    old: Sequence[TaskSnapshot | None],
    ran: Mapping[int, QuerySnapshot],
    parallelism: int,
    groups: int,
    key: str,
    *,
    whole_partitions: bool,
) -> dict[int, KeyedStateShare]:
    """By index of a new instance, its share.

    All instances continue one query, that with the earliest watermark: a later one would make rows late that are not. But where
    each gets whole partitions of one old instance, it continues the query of that instance, whose partitions stay as they are.
    An instance that would get whole partitions, and none of whose old instances has state, has no share: it begins a new query.

    Args:
        old: by old instance, its snapshot; None for one that has ended.
        ran: by old instance that has not ended and whose query has run a batch, the query; at least one.
        parallelism: the new number of instances.
        groups: the number of key groups.
        key: the column by which rows are routed.
        whole_partitions: whether each key group is a state partition.
    """
    held = {index: key_groups_of(index, len(old), groups) for index in range(len(old))}
    own_query = whole_partitions and parallelism % len(old) == 0
    earliest = min(ran, key=lambda i: (_event_time(old[i]), i))
    shares = {}
    for index in range(parallelism):
        own = key_groups_of(index, parallelism, groups)
        parts = {i: query for i, query in ran.items() if set(held[i]) & set(own)}
        if parts or not whole_partitions:
            continued = next(iter(parts)) if own_query else earliest
            shares[index] = KeyedStateShare(own, groups, key, continued, parts, held, whole_partitions)
    return shares


def _event_time(task: TaskSnapshot | None) -> float:
    return float("-inf") if task is None or task.valve_watermark is None else task.valve_watermark
