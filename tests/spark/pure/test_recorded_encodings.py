"""What checkpoints of a restored query record of the encoding of its state."""

from __future__ import annotations

import pytest

from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription, with_encoding_of
from dagster_checkpoints.spark.query.restored_plans import with_recorded_encodings
from dagster_checkpoints.state.errors import StatefulPlanChanged
from dagster_checkpoints.state.metadata import QuerySnapshot, StageInstanceSnapshot, TaskSnapshot
from dagster_checkpoints.state.plans import check_stateful_plans
from dagster_checkpoints.state.processor_states import ENCODED_AS_AVRO

FIRST, OTHER_ORDER = "value last struct<a:bigint,b:bigint>", "value last struct<b:bigint,a:bigint>"


def processor(states: str, encoded: str) -> str:
    return f"transformWithState by k: Last with {states}, output mode append, time mode none{encoded}; watermark ts - 1 minute"


def restored(text: str, batch_id: int = 4) -> TaskSnapshot:
    return TaskSnapshot({"live": StageInstanceSnapshot(state_plan=("sum", text))}, QuerySnapshot(batch_id))


def recorded(snapshot: TaskSnapshot | None, text: str) -> str:
    """What the next checkpoint records of a processor whose text in the session is this one."""
    described = PlanDescription({"live": ("sum", text), "new": ("sum",)}, ("files",), None)
    [_, found] = with_recorded_encodings(described, snapshot).operators["live"]
    return found


def test_a_query_keeps_the_encoding_in_which_it_has_begun() -> None:
    """Spark takes values that are not Avro by their place: fields in another order would exchange their values."""
    for began, now in (("", ENCODED_AS_AVRO), (ENCODED_AS_AVRO, ""), ("", ""), (ENCODED_AS_AVRO, ENCODED_AS_AVRO)):
        assert recorded(restored(processor(FIRST, began)), processor(FIRST, now)) == processor(FIRST, began)
    second = restored(recorded(restored(processor(FIRST, "")), processor(FIRST, ENCODED_AS_AVRO)))
    with pytest.raises(StatefulPlanChanged):
        check_stateful_plans(second, {"live": ("sum", processor(OTHER_ORDER, ENCODED_AS_AVRO))}, "0", {}, "checkpoint 7")


def test_a_query_that_has_no_state_yet_begins_in_the_encoding_of_the_session() -> None:
    for snapshot in (None, TaskSnapshot(), restored(processor(FIRST, ""), batch_id=-1), restored("drop duplicates by k")):
        assert recorded(snapshot, processor(FIRST, ENCODED_AS_AVRO)) == processor(FIRST, ENCODED_AS_AVRO)


@pytest.mark.parametrize("session", ["", ENCODED_AS_AVRO])
def test_an_imported_query_keeps_the_encoding_in_which_it_has_begun(session: str) -> None:
    described = PlanDescription({"live": ("sum", processor(FIRST, session))}, ("files",), None)
    for settings, expected in (
        ({}, ""),
        ({"spark.sql.streaming.stateStore.encodingFormat": "unsaferow"}, ""),
        ({"spark.sql.streaming.stateStore.encodingFormat": "Avro"}, ENCODED_AS_AVRO),
    ):
        assert with_encoding_of(described, settings).operators == {"live": ("sum", processor(FIRST, expected))}
