"""The events of the start of queries: one per query, with any number of instances. Without Spark."""

from __future__ import annotations

from dagster_checkpoints.pipeline import Chain, TaskId
from dagster_checkpoints.spark.job.events import FirstBatch, QueryEvent, QueryStarted, QueryWaiting
from dagster_checkpoints.spark.job.job_reporter import QueryStarts
from dagster_checkpoints.spark.tasks.messages import StartProgress, TaskFirstBatch, TaskQueryStarted, TaskWaiting

LIVE = Chain("live", ("live",), ("EWR", "JFK"))
WINDOWS = Chain("joined", ("joined", "windows"), ("0",))
EWR, JFK, ONLY = TaskId("live", 0), TaskId("live", 1), TaskId("joined", 0)


def events_of(*news: StartProgress, tasks: tuple[TaskId, ...] = (EWR, JFK, ONLY)) -> list[QueryEvent]:
    starts = QueryStarts((LIVE, WINDOWS), tasks, began=10.0)
    events = (starts.take(each, 11.0 + number) for number, each in enumerate(news))
    return [event for event in events if event is not None]


def test_a_query_has_started_when_its_last_instance_has() -> None:
    assert events_of(TaskQueryStarted(JFK), TaskQueryStarted(ONLY), TaskQueryStarted(EWR)) == [
        QueryStarted(("joined", "windows"), 1, 1, 2, 2.0),
        QueryStarted(("live",), 2, 2, 2, 3.0),
    ]


def test_a_query_that_is_started_again_for_its_last_batch_is_not_reported() -> None:
    assert len(events_of(TaskQueryStarted(ONLY), TaskQueryStarted(ONLY))) == 1


def test_instances_and_queries_that_have_finished_are_not_counted() -> None:
    assert events_of(TaskQueryStarted(JFK), tasks=(JFK,)) == [QueryStarted(("live",), 1, 1, 1, 1.0)]


def test_waiting_is_reported_once() -> None:
    assert events_of(TaskWaiting(EWR, ("names",)), TaskWaiting(JFK, ("names",))) == [QueryWaiting(("live",), ("names",))]


def test_the_first_batch_and_the_first_with_rows_are_reported() -> None:
    batches = [TaskFirstBatch(EWR, 0, 0.1), TaskFirstBatch(JFK, 0, 0.2), TaskFirstBatch(JFK, 7, 0.3), TaskFirstBatch(EWR, 9, 0.4)]
    assert events_of(*batches) == [FirstBatch(("live",), "EWR", 0, 0.1), FirstBatch(("live",), "JFK", 7, 0.3)]
    assert events_of(TaskFirstBatch(ONLY, 3, 0.1, 50), TaskFirstBatch(ONLY, 4, 0.1)) == [
        FirstBatch(("joined", "windows"), "0", 3, 0.1, 50)
    ]
