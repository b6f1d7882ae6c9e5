"""What `check_pipeline` and `run_pipeline` refuse before Spark starts."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints import ParquetSink, Pipeline, StageInput, stage, unbounded_source
from dagster_checkpoints.pipeline.errors import UnknownStageError
from dagster_checkpoints.testing import (
    InvalidTestRowsError,
    SourceRows,
    check_pipeline,
    pipeline_check,
    pipeline_runs,
    run_pipeline,
)


@unbounded_source(instances=["EWR", "JFK"])
def flights(context: Any) -> Any: ...


@stage(inputs={"flights": StageInput(edge="all_to_all")}, sink=ParquetSink("/nowhere"))
def delays(flights: Any) -> Any:
    return flights


PIPELINE = Pipeline("flights", [flights, delays])
ROWS = {"flights": SourceRows("n long", [(1,), (2,)])}


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def started() -> None:
        raise AssertionError("Spark is started")

    for module in (pipeline_check, pipeline_runs):
        monkeypatch.setattr(module, "session_for_tests", started)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"allow": "asks the clock"},
            r"allow: expected a list of texts, found the text 'asks the clock'. Write \['asks the clock'\]",
        ),
        ({"in_order": "flights"}, "in_order: expected a list of texts"),
        ({"ignore": {"delays": "loaded_at"}}, r"ignore\['delays'\]: expected a list of texts"),
    ],
)
def test_a_text_in_place_of_several_is_refused(arguments: dict[str, Any], text: str) -> None:
    """Each of its characters would be accepted, or ignored: `allow="asks the clock"` accepted every finding."""
    with pytest.raises(InvalidTestRowsError, match=text):
        check_pipeline(PIPELINE, ROWS, **arguments)


@pytest.mark.parametrize("arguments", [{"in_order": ["flight"]}, {"ignore": {"delay": ["at"]}}])
def test_names_of_no_stage_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnknownStageError, match="Did you mean"):
        check_pipeline(PIPELINE, ROWS, **arguments)


@pytest.mark.parametrize("names", [("flights", "flights[JFK]"), ("flights[JFK]", "flights")])
def test_rows_of_a_source_and_of_one_of_its_instances_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(InvalidTestRowsError, match=r"found those of flights\[JFK\] twice: those of the source 'flights'"):
        run_pipeline(PIPELINE, {name: SourceRows("n long", [(1,)]) for name in names})


def test_a_source_without_steps_has_no_rows() -> None:
    assert SourceRows("n long").steps == ([],)
