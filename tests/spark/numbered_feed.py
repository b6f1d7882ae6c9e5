"""A source of the crash tests that keeps list, union list and broadcast state, and whose rows show whether it was restored."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Stage, StageKind


class NumberedFeed(Stage):
    """Numbers the rows of each feed, from the first number on, through all runs: each kind of operator state has a part in it.

    Values rise by three from row to row, so that a row's number is known: the first number and a third of its value.
    """

    kind = StageKind.UNBOUNDED_SOURCE
    watermark = ("ts", "10 minutes")
    first_number = 1000

    def __init__(self, source: str, schema: str, feeds: list[str]) -> None:
        super().__init__(name="live", instances=feeds)
        self.source, self.schema = source, schema

    def open(self, context: Any) -> None:
        self.feed, self.state = context.instance, context.state
        if not list(self.state.union("read")):  # a new start
            self.state.broadcast("numbers").put("first", self.first_number)
        self.read = dict(self.state.union("read")).get(self.feed, 0)  # of all feeds, in whatever order they are now
        if self.read != sum(self.state.list("batches")):
            raise ValueError(f"{self.feed}: {self.read} rows in the union, {list(self.state.list('batches'))} in the list")
        self.state.union("read").update([[self.feed, self.read]])

    def transform(self, context: Any) -> Any:
        files = context.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        return files.parquet(f"{self.source}/live-{context.instance}").withColumn("number", F.lit(0).cast("long"))

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        rows, least = batch.agg(F.count("*"), F.min("v")).first()
        number = self.state.broadcast("numbers").get("first") + self.read
        self.read += rows
        self.state.list("batches").add(rows)
        self.state.union("read").update([[self.feed, self.read]])
        return batch.withColumn("number", ((F.col("v") - least) / 3 + number).cast("long"))


def numbered_rows(rows: DataFrame) -> DataFrame:
    """The rows of a :class:`NumberedFeed`, of a table with all of its rows."""
    return rows.withColumn("number", (F.col("v") / 3 + NumberedFeed.first_number).cast("long"))
