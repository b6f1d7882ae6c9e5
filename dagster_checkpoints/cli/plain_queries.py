"""`import` and `export`: take over a plain Spark query with its state, and give one back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from dagster_checkpoints.cli.exits import UsageProblem
from dagster_checkpoints.cli.loading import code_options, load_chosen
from dagster_checkpoints.cli.locate import LOCATION_HELP, located
from dagster_checkpoints.cli.output import (
    bytes_in_words,
    count_of,
    facts,
    prints_as_other_text,
    watermark_in_words,
    with_outcome,
    write,
    write_json,
)
from dagster_checkpoints.cli.storage_options import StorageOptions, storage_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from dagster_checkpoints.spark.stored_state import CheckpointExport, CheckpointImport


@click.command("import")
@click.argument("checkpoint")
@code_options
@click.option("--stage", "-s", required=True, help="Name of a stage of the query, which goes on as a part of the pipeline.")
@click.option("--output", metavar="DIR", help="What the query has written, if Spark's file sink or Delta Lake wrote it.")
@click.option(
    "--last-batch", type=click.IntRange(min=-1), help="Of other sinks: the last micro-batch whose rows are in the output."
)
@click.option("--spark-version", metavar="VERSION", default="", help="Spark that ran the query. Default: the installed one.")
@click.option("--target", metavar="DIR", default="", help="Where the savepoint is written. Default: the pipeline's savepoints/.")
@click.option("--name", default="imported", show_default=True, help="A part of the savepoint's name.")
@click.option("--dry-run", is_flag=True, help="Check everything, say what would be taken, and write nothing.")
@storage_options
def import_command(
    options: StorageOptions,
    checkpoint: str,
    module: str | None,
    file: str | None,
    attribute: str | None,
    stage: str,
    output: str | None,
    last_batch: int | None,
    spark_version: str,
    target: str,
    name: str,
    dry_run: bool,
) -> None:
    """Make a savepoint from CHECKPOINT, the checkpoint directory of a plain Structured Streaming query that has stopped.

    A run of the pipeline that names the savepoint (restore_from) goes on where the query has stopped, with its state. Spark runs
    in this process, with the settings of the code location's CheckpointCoordinatorResource, and the functions of the stages are
    called.
    """
    from dagster_checkpoints.spark.session.spark_session import build_session
    from dagster_checkpoints.spark.stored_state import import_checkpoint

    chosen = load_chosen(module, file, attribute, options.pipeline)
    if chosen is None:
        raise UsageProblem("expected -m or -f with the code of the pipeline, found neither")
    code, pipeline = chosen
    if not dry_run and not target:
        with options.storage_of(options.store(), pipeline.name) as storage:
            target = f"{storage.url}/savepoints"
    settings = {"spark.master": "local[2]", "spark.app.name": "dagster-checkpoints import"}
    spark = build_session({**code.spark_settings(), **settings})
    try:
        with prints_as_other_text():
            found = import_checkpoint(
                spark,
                pipeline,
                checkpoint,
                stage=stage,
                target=target,
                output=output,
                last_batch=last_batch,
                spark_version=spark_version,
                name=name,
                dry_run=dry_run,
                open_at=options.store,
            )
    finally:
        if spark.sparkContext.appName == settings["spark.app.name"]:  # not the session of a program that calls this command
            spark.stop()
    with with_outcome(f"The savepoint is {found.url}" if not dry_run else ""):
        if options.as_json:
            write_json(found)
        else:
            write(*_imported(found, dry_run, output is not None or last_batch is not None))


def _imported(found: CheckpointImport, dry_run: bool, output_known: bool) -> Iterator[RenderableType]:
    from rich.text import Text

    taken, planned = "Would take" if dry_run else "Took", found.planned_again
    again = f"; batch {planned}, which is not in the output, is planned again" if planned is not None else ""
    yield Text(f"{taken} micro-batch {found.batch_id} of {found.checkpoint}{again}", style="bold")
    operators = ", ".join(f"[{number}] {name}" for number, name in sorted(found.operators.items()))
    yield facts(
        ("savepoint", found.url),
        ("query", found.query_id),
        ("stages", " -> ".join(found.stages)),
        ("state", operators or "none"),
        ("watermark", _moment(found.watermark_ms)),
        ("size", f"{count_of(found.files, 'file')}, {bytes_in_words(found.bytes)}"),
    )
    yield from _sources(found.sources)
    yield from map(Text, found.changes)
    if not output_known:
        yield Text(
            f"Nothing says what the output holds: batch {found.batch_id} is taken for its last one. A query with a real-time or "
            "continuous trigger, or with asynchronous progress tracking, may have written rows of a later one, which would be "
            "there twice: start it once more without these, and stop it."
        )
    if not dry_run:
        yield Text(f"Start the pipeline from it: restore_from: {found.url}")


@click.command("export", epilog=LOCATION_HELP)
@click.argument("location")
@click.argument("directory")
@click.option("--stage", "-s", required=True, help="Name of a stage of the query.")
@click.option("--output", metavar="DIR", help="A new directory into which Spark's file sink of the plain query is to write.")
@storage_options
def export_command(options: StorageOptions, location: str, directory: str, stage: str, output: str | None) -> None:
    """Write DIRECTORY, a checkpoint directory from which a plain Structured Streaming query goes on where the stage has stopped.

    LOCATION is a savepoint; stop the pipeline with it. The plain query has the plan of the stages that share the stage's query.
    """
    from dagster_checkpoints.spark.stored_state import export_checkpoint

    with located(options, location) as stored:
        url = stored.url
    found = export_checkpoint(url, directory, stage=stage, output=output, open_at=options.store)
    with with_outcome(f"Wrote {found.directory}"):
        if options.as_json:
            write_json({**{name: getattr(found, name) for name in found.__slots__}, "directory": str(found.directory)})
        else:
            write(*_exported(found))


def _exported(found: CheckpointExport) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(f"Wrote {found.directory}", style="bold")
    yield facts(
        ("stages", " -> ".join(found.stages)),
        ("after batch", str(found.batch_id)),
        ("watermark", _moment(found.watermark_ms)),
        ("Spark", found.spark_version),
    )
    yield from _sources(found.sources)
    yield Text(f"Start the query with .option('checkpointLocation', '{found.directory}')")
    if found.transactions:
        yield Text(
            f"The savepoint holds {count_of(found.transactions, 'transaction')} of the sink, whose rows the plain query does not "
            "write: the pipeline's stop has committed them, or its next checkpoint does."
        )


def _moment(watermark_ms: int) -> str:
    return watermark_in_words(watermark_ms) if watermark_ms else "none yet"


def _sources(sources: Sequence[tuple[str, Any]]) -> Iterator[RenderableType]:
    from rich.text import Text

    for number, (source, offset) in enumerate(sources):
        yield Text(f"source [{number}] {source}: {json.dumps(offset)}")
