"""The logs of a query that is made of several ones: settings, and the watermark under which it begins. No Spark runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagster_checkpoints.spark.query.joined_plans import QueriesStayApart
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS, QueryLog
from dagster_checkpoints.spark.snapshots.joined_queries import RecordedLog, continue_as_one, joined_configuration


def recorded(
    folder: Path, batch_id: int, under: int, due: int, *, partitions: int = 5, keeps_state: bool = True, provider: str = "rocks"
) -> RecordedLog:
    """A query whose last batch ran under one watermark, and has recorded another one."""
    configuration = {STATE_PARTITIONS: str(partitions), "provider": provider}
    for batch in (batch_id - 1, batch_id):
        for log, document in (
            ("offsets", {"batchWatermarkMs": under, "batchTimestampMs": 1, "conf": configuration}),
            ("commits", {"nextBatchWatermarkMs": due, "stateUniqueIds": {}}),
        ):
            file = folder / log / str(batch)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(["v1", json.dumps(document), *(['{"logOffset":3}'] if log == "offsets" else [])]))
    return RecordedLog(QueryLog(folder), batch_id, keeps_state)


@pytest.mark.parametrize(
    ("first", "second", "begins"),
    [
        ((100, 500), (300, 400), 500),  # the second query has not run under the watermark of the first one yet
        ((0, 0), (300, 400), 400),  # the first one has no watermark: it keeps no state, and reads channels
        ((100, 500), (500, 500), 500),  # windows that the second one has emitted are not opened again
        ((500, 500), (300, 300), 500),  # windows up to the watermark of the first one are due in the second one
    ],
)
def test_the_first_batch_has_no_input_and_the_latest_watermark(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int], begins: int
) -> None:
    parts = [recorded(tmp_path / "first", 7, *first), recorded(tmp_path / "second", 3, *second)]
    log = recorded(tmp_path / "joined", 7, *first).log
    continue_as_one(log, parts, {STATE_PARTITIONS: "9"})
    assert (log.last_committed(), log.newest_planned(), log.next_watermark(7)) == (7, 8, begins)
    assert log.planned(7).watermark_ms == first[0]
    planned = log.planned(8)
    assert (planned.watermark_ms, planned.sources) == (begins, log.planned(7).sources)
    assert [dict(log.configuration(batch)) for batch in (6, 7, 8)] == [{STATE_PARTITIONS: "9"}] * 3
    log.plan_due_watermark()  # as the task does before its query starts
    assert log.planned(8).watermark_ms == begins


def test_a_query_whose_later_stages_keep_no_state_goes_on_as_it_was(tmp_path: Path) -> None:
    parts = [recorded(tmp_path / "first", 7, 1, 2), recorded(tmp_path / "second", 9, 1, 5, keeps_state=False)]
    log = recorded(tmp_path / "joined", 7, 1, 2).log
    continue_as_one(log, parts, joined_configuration("first", parts, None))
    assert (log.newest_planned(), log.next_watermark(7)) == (7, 2)


def test_settings_of_state(tmp_path: Path) -> None:
    stateless = recorded(tmp_path / "a", 7, 0, 0, partitions=200, keeps_state=False)
    five, other = recorded(tmp_path / "b", 7, 0, 0), recorded(tmp_path / "c", 7, 0, 0, provider="hdfs")
    assert joined_configuration("a", [stateless, five], None)[STATE_PARTITIONS] == "5"
    assert joined_configuration("a", [stateless], None)[STATE_PARTITIONS] == "200"
    assert joined_configuration("a", [five, five], 5)[STATE_PARTITIONS] == "5"
    with pytest.raises(QueriesStayApart, match="their state has provider = rocks and hdfs") as raised:
        joined_configuration("a", [five, stateless, other], None)
    assert raised.value.chain == "a"
    with pytest.raises(QueriesStayApart, match="number of state partitions changes"):
        joined_configuration("a", [stateless, five], 7)
