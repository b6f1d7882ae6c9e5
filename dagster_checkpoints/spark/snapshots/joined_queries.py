"""The logs of a query that is made of several recorded ones: its settings, and the watermark that it begins with.

`state.joined_chains` decides which queries become one, and which files it has. It must not know the job, nor how checkpoints are
stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagster_checkpoints.spark.query.joined_plans import QueriesStayApart
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS, QueryLog


@dataclass(frozen=True, slots=True)
class RecordedLog:
    """The logs of a recorded query.

    Attributes:
        log: The logs, on this machine.
        batch_id: Its last batch.
        keeps_state: Whether it has state.
    """

    log: QueryLog
    batch_id: int
    keeps_state: bool


def joined_configuration(chain: str, recorded: Sequence[RecordedLog], state_partitions: int | None) -> Mapping[str, str]:
    """The settings that the state of several queries has in common.

    Args:
        chain: The name of the chain that is made of them.
        recorded: The queries, in order.
        state_partitions: The number of state partitions that each query gets; None if it keeps its own.

    Raises:
        QueriesStayApart: The settings are different, or the number of state partitions changes.
    """
    first, *others = [each.log.configuration(each.batch_id) for each in recorded if each.keeps_state] or [
        recorded[0].log.configuration(recorded[0].batch_id)
    ]
    for other in others:
        different = sorted(key for key in {*first, *other} if first.get(key) != other.get(key))
        if different:
            key = different[0]
            raise QueriesStayApart(chain, f"their state has {key} = {first.get(key)} and {other.get(key)}")
    if state_partitions is not None and first.get(STATE_PARTITIONS) != str(state_partitions):
        raise QueriesStayApart(chain, "the number of state partitions changes in the same restore")
    return first


def continue_as_one(log: QueryLog, recorded: Sequence[RecordedLog], configuration: Mapping[str, str]) -> None:
    """Let a query continue with the state of several ones, under the latest of their watermarks.

    Its first batch has no input. A later query may have run under the watermark that the first one had only recorded for its next
    batch: it has emitted windows that rows of that batch must not open again. And windows that were due in it are due still.

    Args:
        log: The logs of the joined query, which are those of the first one.
        recorded: The queries that it is made of, in order.
        configuration: The settings of their state.
    """
    log.take_configuration(configuration)
    if any(each.keeps_state for each in recorded[1:]):
        due = max(each.log.next_watermark(each.batch_id) for each in recorded)
        log.begin_with_watermark(max(due, log.planned(log.last_committed()).watermark_ms))
