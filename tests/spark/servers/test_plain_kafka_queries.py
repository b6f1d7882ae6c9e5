"""A plain query that reads topics of a real broker is taken over by a pipeline, and goes on as a plain one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from bench.kafka_broker import KafkaBroker, add_connector
from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.spark.stored_state import export_checkpoint, import_checkpoint
from dagster_checkpoints.state.plain_queries import ImportRefused


def windows(messages: Any) -> Any:
    sums = messages.groupBy(F.window("ts", "5 minutes"), "topic").agg(F.sum("v").alias("v"))
    return sums.select("topic", F.window_time("window").alias("ts"), "v")


@pytest.mark.parametrize("how", ["stopped", "in the output", "not in the output"])
def test_windows_over_topics_there_and_back(lab: Any, kafka: KafkaBroker, kafka_jars: list[Path], how: str) -> None:
    add_connector(lab.spark, kafka_jars)
    topics = [f"plain-{name}-{how.replace(' ', '-')}" for name in "ab"]
    for topic in topics:
        kafka.create_topic(topic, 2)
    sent: list[tuple[str, int]] = []

    def send(count: int) -> None:
        first = len(sent) // 2
        for topic in topics:
            kafka.send(topic, [str(n) for n in range(first, first + count)])
        sent.extend((topic, n) for n in range(first, first + count) for topic in topics)

    def read(spark: Any, subscribed: list[str] = topics) -> Any:
        options = {"kafka.bootstrap.servers": kafka.servers, "subscribe": ", ".join(subscribed), "startingOffsets": "earliest"}
        loaded = spark.readStream.format("kafka").options(**options, maxOffsetsPerTrigger=40).load()
        numbered = loaded.selectExpr("topic", "CAST(CAST(value AS STRING) AS BIGINT) AS v")
        return numbered.withColumn("ts", F.timestamp_seconds(F.lit(1_767_225_600) + F.col("v") * 10))

    def run_plain(checkpoint: Path, output: Path) -> None:
        plain = windows(read(lab.spark).withWatermark("ts", "10 minutes")).writeStream.format("parquet")
        query = plain.option("checkpointLocation", str(checkpoint)).start(str(output))
        query.processAllAvailable()
        query.stop()

    def pipeline(subscribed: list[str]) -> Pipeline:
        @unbounded_source(watermark=("ts", "10 minutes"))
        def live(context: Any) -> Any:
            return read(context.spark, subscribed)

        @stage(name="windows", sink=lab.sink())
        def last(live: Any) -> Any:
            return windows(live)

        return Pipeline("topics", [live, last])

    checkpoint, output, target = lab.folder / "checkpoint", lab.folder / "plain", str(lab.folder / "savepoints")
    send(100)
    run_plain(checkpoint, output)
    last = max(int(each.name) for each in (checkpoint / "commits").iterdir() if each.name.isdecimal())
    if how != "stopped":
        (checkpoint / f"commits/{last}").unlink()
    if how == "not in the output":
        (output / f"_spark_metadata/{last}").unlink()
    with pytest.raises(ImportRefused, match="expected offsets of the topics"):
        import_checkpoint(lab.spark, pipeline(topics[:1]), checkpoint, stage="windows", output=output, dry_run=True)
    taken = import_checkpoint(lab.spark, pipeline(topics), checkpoint, stage="windows", output=output, target=target)
    send(100)
    job = lab.start(pipeline(topics), interval=0.5, restore_from=taken.url)
    job.wait_until(lambda: lab.count() > 0)
    savepoint = job.done("stop", target=target).url
    back = export_checkpoint(savepoint, lab.folder / "back", stage="windows", output=lab.folder / "again")
    send(50)
    run_plain(back.directory, lab.folder / "again")
    for topic in topics:
        kafka.send(topic, ["1000000", "1000000"])
    run_plain(back.directory, lab.folder / "again")

    found = Counter(lab.committed())
    for each in (output, lab.folder / "again"):
        found.update(lab.rows(lab.spark.read.parquet(str(each))))
    rows = lab.spark.createDataFrame(sent, "topic string, v long")
    rows = rows.withColumn("ts", F.timestamp_seconds(F.lit(1_767_225_600) + F.col("v") * 10))
    wanted = Counter(lab.rows(windows(rows)))
    assert found == wanted, (list((wanted - found).elements())[:5], list((found - wanted).elements())[:5])
