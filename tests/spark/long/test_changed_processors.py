"""A stage's transformWithState processor gets other states: rows go on exactly, with the values that the checkpoint holds."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone
from dagster_checkpoints.state.errors import StatefulPlanChanged

ROWS = "k string, ts timestamp, v long"
COLUMNS = "k string, v long, seen string"


def described(frame: Any, states: dict[str, str]) -> Any:
    """For each row what the states held in front of it; then each field of each state counts its rows."""
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Counts(StatefulProcessor):
        def init(self, handle):
            self.states = {name: handle.getValueState(name, schema) for name, schema in states.items()}

        def handleInputRows(self, key, rows, timerValues):
            for batch in rows:
                for v in sorted(batch["v"]):
                    seen = {name: tuple(state.get()) if state.exists() else None for name, state in self.states.items()}
                    for name, state in self.states.items():
                        held = seen[name] or (None,) * (states[name].count(",") + 1)
                        state.update(tuple((n or 0) + 1 for n in held))
                    yield pd.DataFrame({"k": [key[0]], "v": [v], "seen": [str(seen)]})

        def close(self):
            pass

    return frame.groupBy("k").transformWithStateInPandas(Counts(), COLUMNS, "Append", "None")


def pipeline(lab: Any, states: dict[str, str]) -> Pipeline:
    @unbounded_source
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("counts"))
    def counts(live):
        return described(live, states)

    return Pipeline("processors", [live, counts])


def test_states_and_their_fields_may_be_added_and_left_out(lab: Any, spark: Any) -> None:
    encoding = "spark.sql.streaming.stateStore.encodingFormat"
    spark.conf.set(encoding, "avro")
    expected = []
    try:
        for number, (states, seen) in enumerate(
            [
                ({"a": "n int"}, "{'a': None}"),
                ({"a": "n long, m int, o int", "b": "n int"}, "{'a': (1, None, None), 'b': None}"),
                ({"a": "m int, n long"}, "{'a': (1, 2)}"),
            ]
        ):
            lab.put("live", ROWS, [("x", lab.at(number), number)])
            job = lab.start(pipeline(lab, states))
            job.wait_for(CheckpointDone, lambda done, rows=number + 1: lab.count("counts") == rows)
            job.cancel()
            assert job.result().status == "CANCELED"
            expected.append(("x", number, seen))
            lab.check(expected, "counts")
        job = lab.start(pipeline(lab, {"a": "m int, total long"}))
        with pytest.raises(StatefulPlanChanged, match=r"value a struct<m:int,n:bigint>.*\n  Now: .*<m:int,total:bigint>"):
            raise job.result().error
    finally:
        spark.conf.unset(encoding)
