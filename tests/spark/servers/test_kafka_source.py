"""Kafka as a source, with Spark's own connector and a real broker: every row once, whatever happens to both."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from bench.kafka_broker import KafkaBroker, add_connector
from dagster_checkpoints.control.status import read_status
from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, Quarantine, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import KafkaSink, ParquetSink
from dagster_checkpoints.spark.errors import SourceRowsLostError
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted
from dagster_checkpoints.spark.query.kafka_offsets import rows_behind

ROOT = Path(__file__).parents[3]
RUNNER = Path(__file__).with_name("kafka_runner.py")
DEADLINE = 240.0


@pytest.fixture
def kafka_lab(lab: Any, kafka_jars: list[Path]) -> Any:
    """The test environment, whose session has Spark's connector, as with the setting `spark.jars`."""
    add_connector(lab.spark, kafka_jars)
    return lab


def reading(lab: Any, kafka: KafkaBroker, topic: str, **options: Any) -> Any:
    """A stream of a topic's messages."""
    settings = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 40, **options}
    return lab.spark.readStream.format("kafka").options(**{"kafka.bootstrap.servers": kafka.servers, **settings}).load()


def as_rows(messages: Any) -> Any:
    return messages.selectExpr("CAST(value AS STRING) AS text", "partition", "offset")


def test_messages_that_are_no_json_go_to_a_topic_of_their_own(kafka_lab: Any, kafka: KafkaBroker, tmp_path: Path) -> None:
    """Also those without a value or without text: Spark parses them as null, in which no corrupt record is noted."""
    lab = kafka_lab
    for topic in ("orders", "dead", "large"):
        kafka.create_topic(topic)
    wrong: list[Any] = [None, b"", b" ", b"null", b"[]", b"no JSON", b'{"n": "none"}', b"7", b"\xff {"]
    kafka.send("orders", [*[f'{{"n": {n}}}' for n in range(20)], *wrong])
    dead = KafkaSink("dead", kafka.servers, staging=tmp_path / "dead", value="value", headers=["refused_by"])
    parsed = Quarantine(
        {"has_value": "value IS NOT NULL", "is_parsed": "row IS NOT NULL AND row._corrupt_record IS NULL"}, sink=dead
    )

    @unbounded_source(quarantine=parsed)
    def messages(context: Any) -> Any:
        row = F.from_json(F.col("value").cast("string"), "n long, _corrupt_record string")
        return reading(lab, kafka, "orders", maxOffsetsPerTrigger=5).select(
            "value", row.alias("row"), row["_corrupt_record"].alias("text")
        )

    @stage(
        sink=KafkaSink("large", kafka.servers, staging=tmp_path / "large"),
        quarantine=Quarantine({"is_large": "n >= 15"}, sink=lab.sink("small")),
    )
    def large(messages: Any) -> Any:
        return messages.selectExpr("row.n")

    job = lab.start(Pipeline("p", [messages, large]), interval=0.5)
    job.wait_until(lambda: kafka.count("dead") > 0)
    job.cancel()
    job.result()
    job = lab.start(Pipeline("p", [messages, large]), interval=0.5)
    job.wait_until(lambda: sum(job.execution.rows().get(name, 0) for name in ("messages", "messages_refused")) == 29)
    job.drain()
    job.finished()
    found = [(each.value(), dict(each.headers())["refused_by"].decode()) for each in kafka.messages("dead")]
    expected = [(None, "has_value, is_parsed"), *((value, "is_parsed") for value in wrong if value is not None)]
    assert sorted(found, key=repr) == sorted(expected, key=repr)
    assert sorted(json.loads(each.value())["n"] for each in kafka.messages("large")) == [*range(15, 20)]
    assert sorted(row[0] for row in lab.committed("small")) == [*range(15)]


class BatchSizes(ParquetSink):
    """A sink that remembers the sizes of micro-batches, and fails once if a file says so."""

    sizes: ClassVar[list[int]] = []

    def write(self, batch: Any, files: Any, batch_id: int) -> None:
        self.sizes.append(sum(pq.read_metadata(file.removeprefix("file://")).num_rows for file in files))
        fault = self.path.parent / "fault"
        if fault.exists():
            fault.unlink()
            raise OSError("the test fails the sink")
        super().write(batch, files, batch_id)


def texts(lab: Any, name: str = "out") -> list[str]:
    return sorted(row[0] for row in lab.committed(name))


def numbered(first: int, end: int) -> list[str]:
    return [f"{n:05d}" for n in range(first, end)]


def test_a_live_topic_through_failures_of_the_job_and_of_the_broker(kafka_lab: Any, kafka: KafkaBroker) -> None:
    lab = kafka_lab
    kafka.create_topic("live", 2)
    sent: list[str] = []

    def send(count: int, partition: int = -1) -> None:
        values = numbered(len(sent), len(sent) + count)
        kafka.send("live", values, partition)
        sent.extend(values)

    @unbounded_source
    def live(context: Any) -> Any:
        return reading(lab, kafka, "live", **{"kafka.metadata.max.age.ms": 500})

    @stage(sink=BatchSizes(lab.folder / "out"))
    def rows(live: Any) -> Any:
        return as_rows(live)

    pipeline = Pipeline("topic", [live, rows])
    BatchSizes.sizes.clear()

    def run() -> Any:
        return lab.start(pipeline, interval=0.5, restart=FixedDelayRestart(50, 0.2))

    send(200)
    job = run()
    behind = set()

    def all_committed() -> bool:
        status = read_status(lab.storage("topic"))
        behind.update(each.rows_behind for part in (status.stages if status else ()) for each in part.instances)
        return lab.count() == len(sent)

    job.wait_until(all_committed)
    job.wait_until(lambda: all_committed() and 0 in behind)
    assert behind <= {None, 0, *range(1, 200)}, behind
    assert max(BatchSizes.sizes) <= 42 and len(BatchSizes.sizes) >= 5  # 40, and a part of a row for each partition
    kafka.add_partitions("live", 4)
    (lab.folder / "fault").touch()
    send(60)
    send(30, partition=3)
    job.wait_until(lambda: lab.count() == len(sent))
    assert not (lab.folder / "fault").exists()
    kafka.stop()
    kafka.start()
    send(50, partition=2)
    job.wait_until(lambda: lab.count() == len(sent))
    job.cancel()
    assert job.result().status == "CANCELED"
    send(100)
    job = run()
    job.wait_until(lambda: lab.count() == len(sent))
    job.execution.end_source("live")
    job.finished()
    kafka.send("live", ["too late"])
    assert texts(lab) == sent
    assert len({row[1:] for row in lab.committed()}) == len(sent)


class Gated(Stage):
    """While the file `closed` exists, each micro-batch waits for a permit, which is a file."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(inputs={"live": StageInput()}, **options)
        self.closed, self.permit = folder / "closed", folder / "permit"

    def transform(self, context: Any, live: Any) -> Any:
        return as_rows(live)

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        while self.closed.exists():
            if self.permit.exists():
                self.permit.unlink()
                break
            time.sleep(0.02)
        return batch


def test_no_periodic_checkpoint_while_as_many_messages_are_unread_as_the_setting_says(kafka_lab: Any, kafka: KafkaBroker) -> None:
    lab = kafka_lab
    kafka.create_topic("backlog")
    kafka.send("backlog", numbered(0, 10))

    @unbounded_source
    def live(context: Any) -> Any:
        return reading(lab, kafka, "backlog")

    rows = Gated(lab.folder, name="rows", sink=lab.sink())
    job = lab.start(
        Pipeline("backlog", [live, rows]), interval=0.3, checkpoints={"interval_during_backlog": 0.0, "backlog_rows": 100}
    )
    job.wait_until(lambda: lab.count() == 10)
    rows.closed.touch()
    kafka.send("backlog", numbered(10, 410))
    coordinator, given, quiet = job.execution.coordinator, 0.0, (0, 0.0)

    def five_intervals_without_a_checkpoint() -> bool:
        """Lets a micro-batch pass every three seconds: the first ones end the checkpoints that began before the backlog."""
        nonlocal given, quiet
        now, counts = time.monotonic(), coordinator.statistics.counts
        if now > given + 3:
            rows.permit.touch()
            given = now
        if counts.in_progress or counts.triggered != quiet[0] or not coordinator._tasks.any_in_backlog:
            quiet = (counts.triggered, now)
        return now > quiet[1] + 1.5

    job.wait_until(five_intervals_without_a_checkpoint)
    rows.closed.unlink()
    job.wait_until(lambda: lab.count() == 410)
    job.drain()
    job.finished()
    assert texts(lab) == numbered(0, 410)


class Offsets:
    def __init__(self, read: str | None, latest: str | None, description: str = "KafkaV2[Subscribe[t]]") -> None:
        self.endOffset, self.latestOffset, self.description = read, latest, description


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([Offsets('{"t":{"0":5,"1":7}}', '{"t":{"0":9,"1":7,"2":3}}')], 7),
        ([Offsets('{"t":{"0":5}}', '{"t":{"0":5}}'), Offsets('{"u":{"0":1}}', '{"u":{"0":3}}')], 2),
        ([Offsets('{"t":{"0":5}}', None)], None),
        ([Offsets('{"t":{"0":5}}', '{"t":{"0":5}}'), Offsets("3", "4", "RateStreamV2[]")], None),
        ([], None),
    ],
)
def test_rows_behind_are_counted_over_partitions(sources: list[Offsets], expected: int | None) -> None:
    assert rows_behind(sources) == expected


def test_rows_that_retention_has_deleted_are_missed_by_name(
    kafka_lab: Any, kafka: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    lab = kafka_lab
    kafka.create_topic("short")
    kafka.send("short", numbered(0, 50))

    def pipeline(**options: Any) -> Pipeline:
        @unbounded_source
        def live(context: Any) -> Any:
            return reading(lab, kafka, "short", **options)

        @stage(sink=lab.sink())
        def rows(live: Any) -> Any:
            return as_rows(live)

        return Pipeline("short", [live, rows])

    job = lab.start(pipeline(), interval=0.5)
    job.wait_until(lambda: lab.count() == 50)
    job.cancel()
    job.result()
    kafka.send("short", numbered(50, 100))
    kafka.delete_before("short", 0, 70)
    job = lab.start(pipeline(), interval=0.5, restart=FixedDelayRestart(50, 0.1))
    error = job.result().error
    assert error is not None and isinstance(error.__cause__, SourceRowsLostError), error
    assert "another attempt would fail in the same way" in str(error)
    assert "Stage 'live'" in str(error) and "retention has deleted them" in str(error) and "failOnDataLoss" in str(error)
    with caplog.at_level(logging.WARNING):
        job = lab.start(pipeline(failOnDataLoss="false"), interval=0.5)
        job.wait_until(lambda: lab.count() == 80)
    assert "rows that Kafka has deleted before they were read are skipped" in caplog.text
    job.drain()
    job.finished()
    assert texts(lab) == numbered(0, 50) + numbered(70, 100)


def test_a_topic_is_read_to_an_end(kafka_lab: Any, kafka: KafkaBroker) -> None:
    """As a stream to the end that it has when it starts, also over a cancelled run, in a query with other sources, and in a
    burst; as a batch between two offsets. The last messages are fewer than the minimum of a micro-batch, and are read as well."""
    lab = kafka_lab
    kafka.create_topic("past", 3)
    for partition in range(3):
        kafka.send("past", numbered(100 * partition, 100 * partition + 100), partition)
    ends = {"past": {"0": 10, "1": 20, "2": 0}}

    limits = {"maxOffsetsPerTrigger": 9, "minOffsetsPerTrigger": 8, "maxTriggerDelay": "3s"}

    @bounded_source(sink=lab.sink())
    def past(context: Any) -> Any:
        return as_rows(reading(lab, kafka, "past", **{**limits, "maxTriggerDelay": "1h"}))

    @bounded_source
    def first(context: Any) -> Any:
        return as_rows(reading(lab, kafka, "past", **limits))

    @bounded_source
    def second(context: Any) -> Any:
        return as_rows(reading(lab, kafka, "past", **{**limits, "maxOffsetsPerTrigger": 200}))

    @stage(sink=lab.sink("both"))
    def both(first: Any, second: Any) -> Any:
        return first.unionByName(second)

    @unbounded_source(sink=lab.sink("now"))
    def now(context: Any) -> Any:
        return as_rows(reading(lab, kafka, "past", **{**limits, "maxTriggerDelay": "1h"}))

    @bounded_source(sink=lab.sink("part"))
    def part(context: Any) -> Any:
        between = {"startingOffsets": json.dumps({"past": dict.fromkeys("012", 0)}), "endingOffsets": json.dumps(ends)}
        options = {"kafka.bootstrap.servers": kafka.servers, "subscribe": "past", **between}
        return as_rows(lab.spark.read.format("kafka").options(**options).load())

    pipeline = Pipeline("past", [past, part, first, second, both])
    job = lab.start(pipeline, interval=0.3)
    job.wait_for(CheckpointDone)
    job.wait_until(lambda: lab.count() > 0)
    job.cancel()
    job.result()
    job = lab.start(pipeline, interval=0.3)
    job.finished()
    assert ("first", "second", "both") in job.chains
    lab.start(Pipeline("now", [now]), interval=0.3, until="caught_up").finished()
    assert texts(lab) == texts(lab, "now") == numbered(0, 300)
    assert texts(lab, "both") == sorted(2 * numbered(0, 300))
    assert texts(lab, "part") == numbered(0, 10) + numbered(100, 120)


def test_a_topic_that_shares_a_query_begins_with_small_batches_without_an_option(
    kafka_lab: Any, kafka: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    lab = kafka_lab
    kafka.create_topic("many", 2)
    kafka.create_topic("few")
    for partition in range(2):
        kafka.send("many", numbered(5000 * partition, 5000 * partition + 5000), partition)
    kafka.send("few", numbered(10_000, 10_100))

    def messages(topic: str, kind: Any, **options: Any) -> Any:
        def read(context: Any) -> Any:
            settings = {"kafka.bootstrap.servers": kafka.servers, "subscribe": topic, "startingOffsets": "earliest", **options}
            return lab.spark.readStream.format("kafka").options(**settings).load()

        return kind(name=topic, watermark=("timestamp", "1 minute"))(read)

    sink = BatchSizes(lab.folder / "out")
    BatchSizes.sizes.clear()

    @stage(sink=sink)
    def rows(many: Any, few: Any) -> Any:
        return as_rows(many.unionByName(few))

    sources = [messages("many", bounded_source), messages("few", unbounded_source, maxOffsetsPerTrigger=40)]
    with caplog.at_level(logging.WARNING):
        job = lab.start(Pipeline("topics", [*sources, rows]), interval=0.5)
        job.wait_until(lambda: lab.count() == 10_100)
    assert job.chains == (("many", "few", "rows"),)
    job.drain()
    job.finished()
    assert "OffsetsPerTrigger" not in caplog.text
    assert BatchSizes.sizes[0] == 1000 + 40 and 1040 < max(BatchSizes.sizes) <= 9040
    assert texts(lab) == numbered(0, 10_100)


def test_messages_sent_since_a_source_began_are_not_skipped_by_a_restart_before_the_next_checkpoint(
    kafka_lab: Any, kafka: KafkaBroker
) -> None:
    """Where "latest" was is recorded by a checkpoint for which the run asks itself: the next one is due in an hour."""
    lab = kafka_lab
    kafka.create_topic("new")
    kafka.send("new", ["before"])

    @unbounded_source(sink=BatchSizes(lab.folder / "out"))
    def live(context: Any) -> Any:
        return as_rows(reading(lab, kafka, "new", startingOffsets="latest"))

    pipeline = Pipeline("new", [live])
    BatchSizes.sizes.clear()
    job = lab.start(pipeline, interval=3600.0, restart=FixedDelayRestart(1, 0.2))
    job.wait_for(CheckpointDone, lambda done: done.checkpoint_id == 1)
    (lab.folder / "fault").touch()
    kafka.send("new", ["in a batch that fails"])
    job.wait_until(lambda: not (lab.folder / "fault").exists() and BatchSizes.sizes[-2:] == [1, 1])
    job.cancel()
    job.result()
    kafka.send("new", ["while nothing runs"])
    job = lab.start(pipeline, interval=0.5)
    assert job.wait_for(JobStarted).restored_checkpoint == 1
    job.wait_until(lambda: lab.count() == 2)
    job.drain()
    job.finished()
    assert texts(lab) == ["in a batch that fails", "while nothing runs"]


def test_completed_checkpoints_are_seen_in_consumer_groups_which_are_never_read(
    kafka_lab: Any, kafka: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Two sources share a query. One group is reset from outside, and the other one gets a member: the broker refuses offsets."""
    lab = kafka_lab
    kafka.create_topic("watched", 2)
    kafka.create_topic("taken")

    def messages(topic: str) -> Any:
        def read(context: Any) -> Any:
            group = {"commit.offsets.on.checkpoint": "true", "kafka.group.id": f"group of {topic}"}
            return reading(lab, kafka, topic, **group)

        return unbounded_source(name=topic, watermark=("timestamp", "1 minute"))(read)

    @stage(sink=lab.sink())
    def rows(taken: Any, watched: Any) -> Any:
        return as_rows(taken.unionByName(watched))

    pipeline = Pipeline("watched", [messages("taken"), messages("watched"), rows])

    def send(first: int) -> None:
        for partition in range(2):
            kafka.send("watched", numbered(first + 10 * partition, first + 10 * partition + 10), partition)
        kafka.send("taken", numbered(first + 20, first + 25))

    def run(rows: int) -> Any:
        job = lab.start(pipeline, interval=0.5)
        job.wait_until(lambda: lab.count() == rows)
        return job

    send(0)
    job = run(25)
    assert job.chains == (("taken", "watched", "rows"),)

    def committed() -> tuple[dict[int, int], ...]:
        return tuple(kafka.committed(f"group of {topic}", topic) for topic in ("watched", "taken"))

    job.wait_until(lambda: committed() == ({0: 10, 1: 10}, {0: 5}))
    job.cancel()
    job.result()
    assert "consumer group" not in caplog.text
    kafka.reset_offsets("group of watched", "watched", {0: 3, 1: 0})
    send(25)
    with kafka.member_of("group of taken", "taken"), caplog.at_level(logging.WARNING):
        job = run(50)
        job.drain()
        job.finished()
    assert committed() == ({0: 20, 1: 20}, {0: 5})
    (warning,) = (text for text in caplog.messages if "consumer group" in text)
    assert (
        "'group of taken'" in warning and "another program is a member of this group" in warning and "The job goes on" in warning
    )
    assert texts(lab) == numbered(0, 50)


def test_from_topic_to_topic_through_a_kill(kafka_jars: list[Path], kafka: KafkaBroker, tmp_path: Path) -> None:
    """Readers of the second topic get each message of the first one once, in the order of its key."""
    kafka.create_topic("first", 2)
    kafka.create_topic("second", 2)
    settings = {"servers": kafka.servers, "source": "first", "target": "second", "jars": [str(jar) for jar in kafka_jars]}
    sent = 0
    for kill in range(2):
        messages = []
        for _ in range(300):
            messages.append((f"key {sent % 7}", f"{sent:05d}"))
            sent += 1
        kafka.send_keyed("first", messages)
        with (tmp_path / f"{kill}.log").open("w") as log:
            command = [sys.executable, str(RUNNER), str(tmp_path), json.dumps({"run_id": f"run-{kill}", **settings})]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
            run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            if kill == 1:
                wait_for(run, tmp_path, lambda sent=sent: len(kafka.messages("second")) >= sent)
                (tmp_path / "drain").touch()
                assert run.wait(DEADLINE) == 0, story(tmp_path)
            else:
                wait_for(run, tmp_path, lambda: len(kafka.messages("second")) >= 120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait(30)
    found = [(message.key(), json.loads(message.value() or b"")["v"]) for message in kafka.messages("second")]
    assert sorted(value for _, value in found) == numbered(0, sent)
    for key in range(7):
        own = [value for at, value in found if at == f"key {key}".encode()]
        assert own == sorted(own) and {int(value) % 7 for value in own} == {key}


def wait_for(run: subprocess.Popen[bytes], folder: Path, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert run.poll() is None and time.monotonic() < until, story(folder)
        time.sleep(0.2)


def story(folder: Path) -> str:
    return "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log")))
