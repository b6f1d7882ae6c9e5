"""A source that never answers is reported in words, and does not count as caught up; one that has no new rows is quiet."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from dagster_checkpoints.control.status import read_status
from dagster_checkpoints.execution import source_answers
from dagster_checkpoints.pipeline import Pipeline, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, SourceAnswered, SourceSilent

ROWS = "k string, v long"


def closed_port() -> int:
    """A port of this machine on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def broker(port: int, up: Path) -> type[DataSource]:
    """A data source that retries to connect until a file says that its broker is up, as clients of brokers do."""

    class Reader(DataSourceStreamReader):
        def initialOffset(self) -> dict[str, int]:
            return {"n": 0}

        def latestOffset(self) -> dict[str, int]:
            while not up.exists():
                with socket.socket() as client:
                    client.connect_ex(("127.0.0.1", port))
                time.sleep(0.1)
            return {"n": 1}

        def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
            return [InputPartition(0)]

        def read(self, partition: InputPartition) -> Any:
            yield ("a", 1)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "broker"

        def schema(self) -> str:
            return ROWS

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return Reader()

    return Source


def test_a_source_that_never_answers_is_reported_and_a_quiet_one_is_not(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_answers, "SILENT_SECONDS", 10.0)
    up = lab.folder / "up"
    lab.spark.dataSource.register(broker(closed_port(), up))

    @unbounded_source(sink=lab.sink("live"))
    def live(context):
        return context.spark.readStream.format("broker").load()

    @unbounded_source(sink=lab.sink("quiet"))
    def quiet(context):
        return lab.stream("quiet", ROWS)

    def instance(name: str) -> Any:
        status = read_status(lab.storage("p"))
        stages = {stage.name: stage for stage in status.stages} if status is not None else {}
        return stages[name].instances[0] if name in stages else None

    try:
        job = lab.start(Pipeline("p", [live, quiet]), status_seconds=0.3)
        silent = job.wait_for(SourceSilent)
        assert silent.sources == ("live",) and silent.silence.doing == "asking" and "Getting offsets" in silent.silence.words
        job.wait_until(lambda: instance("live") is not None and instance("live").silence is not None)
        shown = instance("live")
        assert shown.caught_up is None and "Getting offsets" in shown.silence.words, "a drain at lag 0 would end it unread"
        job.wait_until(lambda: instance("quiet").caught_up is True)
        job.wait_for(CheckpointDone, lambda e: e.checkpoint_id > silent_after(job))
        assert {event.sources for event in job.of(SourceSilent)} == {("live",)}
    finally:
        up.touch()
    assert job.wait_for(SourceAnswered).sources == ("live",)
    job.wait_until(lambda: job.execution.rows()["live"] >= 1)
    job.wait_until(lambda: instance("live").silence is None)
    job.drain()
    job.finished()
    lab.check([("a", 1)], "live")


def silent_after(job: Any) -> int:
    """The newest checkpoint at the moment when the silence was reported."""
    events = job.events
    at = next(number for number, event in enumerate(events) if isinstance(event, SourceSilent))
    return max((event.checkpoint_id for event in events[:at] if isinstance(event, CheckpointDone)), default=0)
