"""The page on Kafka as a source: its code defines stages, and its options are those that Spark's source knows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from bench.kafka_broker import CONNECTOR
from dagster_checkpoints.pipeline import Pipeline, StageKind
from dagster_checkpoints.sources import KafkaSplit, KafkaSplits
from dagster_checkpoints.spark.query.source_checks import StreamingSource, wrong_offset_commit


def test_the_page_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/sources/kafka.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/sources/kafka.md", "exec"), names)
    pipeline = Pipeline("shop", [names["sales"], names["sales_so_far"], names["past_sales"], names["watched_sales"]])
    unbounded, bounded = StageKind.UNBOUNDED_SOURCE, StageKind.BOUNDED_SOURCE
    kinds = [unbounded, bounded, bounded, unbounded]
    assert wrong_offset_commit(StreamingSource("kafka", "kafka", {**names["OPTIONS"], **names["GROUP"]})) == ""
    assert [stage.kind for stage in pipeline.stages] == kinds
    split = KafkaSplit("sales", 0, 0, 10)
    assert pipeline.stages[2].decode_split(pipeline.stages[2].encode_split(split)) == split
    shown = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", page, re.MULTILINE)
    assert {name: default or None for name, default in shown} == {
        each.name: "None" if each.default is None and each.name != "pattern" else None for each in dataclasses.fields(KafkaSplits)
    }
    (connector,) = (jar for jar in CONNECTOR if jar.name.startswith("spark-sql-kafka"))
    assert f"{connector.organisation}:{connector.name}:{connector.version}" in page
