"""`state`: what a checkpoint or savepoint holds of a stage, row by row."""

from __future__ import annotations

import json
import shutil
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from dagster_checkpoints.cli.locate import LOCATION_HELP, located
from dagster_checkpoints.cli.output import count_of, facts, json_line, row, table, watermark_in_words, write, write_json
from dagster_checkpoints.cli.storage_options import StorageOptions, storage_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from rich.console import RenderableType

    from dagster_checkpoints.spark.stored_state import StageState

Rows = list[dict[str, Any]]
_AS_JSON = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",  # Spark's own ends with milliseconds
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_SPLITS = 20
"""Number of splits of each kind that the text shows; JSON has all."""


@click.command(epilog=LOCATION_HELP)
@click.argument("location")
@click.option("--stage", "-s", required=True, help="Name of the stage.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(min=0), help="Rows of each table; 0 for all.")
@storage_options
def state(options: StorageOptions, location: str, stage: str, limit: int) -> None:
    """What a checkpoint or savepoint holds of a stage: keyed state, the states of context.state, offsets, rows on their way.

    Spark runs in this process to read the keyed state. The pipeline may run meanwhile; nothing in storage changes.
    """
    from dagster_checkpoints.spark.session.spark_session import build_session
    from dagster_checkpoints.spark.stored_state import read_state

    with located(options, location) as stored:
        url = stored.url
    spark = build_session({"spark.master": "local[2]", "spark.app.name": "dagster-checkpoints state"})
    try:
        found = read_state(spark, url, stage=stage, open_at=options.store)
        try:
            document = _document(found, url, limit)
        finally:
            shutil.rmtree(found.directory, ignore_errors=True)
    finally:
        _stop(spark)
    if options.as_json:
        write_json(document)
    else:
        write(*_as_text(document))


def _stop(spark: SparkSession) -> None:
    if spark.sparkContext.appName == "dagster-checkpoints state":  # not the session of a program that calls this command
        spark.stop()


def _document(found: StageState, url: str, limit: int) -> dict[str, Any]:
    return {
        "url": url,
        "stage": found.stage,
        "checkpoint": found.checkpoint_id,
        "query_of": found.query_of,
        "finished": found.finished,
        "keyed": [
            {
                "operator_id": keyed.operator_id,
                "operator": keyed.operator,
                "variable": keyed.variable,
                **_rows(keyed.rows, limit),
            }
            for keyed in found.keyed
        ],
        "operator": found.operator,
        "offsets": [
            {
                "instance": each.instance,
                "batch_id": each.batch_id,
                "watermark_ms": each.watermark_ms,
                "sources": [{"source": source, "offset": offset} for source, offset in each.sources],
            }
            for each in found.offsets
        ],
        "in_flight": {name: _rows(frame, limit) for name, frame in found.in_flight.items()},
        "static": {name: _rows(frame, limit) for name, frame in found.static.items()},
        "transactions": found.transactions,
        "splits": found.splits and {field: getattr(found.splits, field) for field in found.splits.__struct_fields__},
    }


def _rows(frame: DataFrame, limit: int) -> dict[str, Any]:
    shown = frame.limit(limit) if limit else frame
    return {"count": frame.count(), "rows": values(shown)}


def values(frame: DataFrame) -> list[Any]:
    """Rows as values of JSON, with all digits of numbers and times."""
    from pyspark.sql import functions as F

    return [parsed(found.row) for found in frame.select(F.to_json(F.struct("*"), _AS_JSON).alias("row")).collect()]


def parsed(text: str) -> Any:
    """A row that Spark gives as JSON, with all digits of its numbers: a decimal may have more of them than a float."""
    return json.loads(text, parse_float=Decimal)


def _as_text(document: dict[str, Any]) -> list[RenderableType]:
    from rich.text import Text

    stage = document["stage"]
    others = [name for name in document["query_of"] if name != stage]
    parts: list[RenderableType] = [
        Text(f"Stage {stage} in checkpoint {document['checkpoint']}", style="bold"),
        facts(
            ("url", document["url"]),
            ("query", f"shared with {', '.join(others)}" if others else ""),
            ("finished", ", ".join(document["finished"])),
            (
                "to commit",
                ", ".join(f"{instance}: {count_of(n, 'transaction')}" for instance, n in document["transactions"].items()),
            ),
        ),
    ]
    for keyed in document["keyed"]:
        parts += _table(f"Operator {keyed['operator_id']}, {keyed['operator']}, {keyed['variable']}", keyed)
    for kind, title in (("in_flight", "On their way from"), ("static", "Static input")):
        for name, rows in document[kind].items():
            parts += _table(f"{title} {name}", rows)
    for each in document["operator"]:
        parts += [
            Text(""),
            Text(f"context.state.{each.kind}({each.name!r}) of {each.instance}", style="bold"),
            Text(_text(each.values)),
        ]
    if document["splits"] is not None:
        more = "" if document["splits"]["complete"] else "; others may be discovered"
        parts += [Text(""), Text(f"Splits{more}", style="bold")]
        for field in ("discovered", "assigned", "finished"):
            splits = document["splits"][field]
            parts += [Text(f"{field} ({len(splits)}): {', '.join(splits[:_SPLITS])}{', …' if len(splits) > _SPLITS else ''}")]
    for each in document["offsets"]:
        moment = watermark_in_words(each["watermark_ms"])
        parts += [Text(""), Text(f"Offsets of {each['instance']}: batch {each['batch_id']}, watermark {moment}", style="bold")]
        parts += [Text(f"{source['source']}: {_text(source['offset'])}") for source in each["sources"]]
    return parts


def _table(title: str, found: dict[str, Any]) -> list[RenderableType]:
    from rich.text import Text

    rows: Rows = found["rows"]
    more = f", the first {len(rows)}" if len(rows) < found["count"] else ""
    columns = list(dict.fromkeys(name for each in rows for name in each))
    shown = table(*columns, keep=columns)
    for each in rows:
        shown.add_row(*row(*(_text(each.get(name)) for name in columns)))
    return [Text(""), Text(f"{title}: {count_of(found['count'], 'row')}{more}", style="bold"), shown]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json_line(value)
