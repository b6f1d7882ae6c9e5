"""`verify`: whether a checkpoint or savepoint is complete, and whether it fits a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dagster_checkpoints.cli.exits import Exit
from dagster_checkpoints.cli.loading import LoadedCode, code_options, load_chosen
from dagster_checkpoints.cli.locate import LOCATION_HELP, locate, opened_for
from dagster_checkpoints.cli.output import bytes_in_words, count_of, prints_as_other_text, write, write_json
from dagster_checkpoints.cli.storage_options import StorageOptions, storage_options
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.storage.verification import Problem, VerificationReport, verify_savepoint

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command(epilog=LOCATION_HELP)
@click.argument("location")
@code_options
@click.option("--allow-non-restored-state", is_flag=True, help="Accept state of stages that the pipeline no longer has.")
@click.option(
    "--plans/--no-plans",
    default=True,
    help="Compare the stages' plans with the state, for which Spark is started. Default: yes, with -m or -f.",
)
@storage_options
def verify(
    options: StorageOptions,
    location: str,
    module: str | None,
    file: str | None,
    attribute: str | None,
    allow_non_restored_state: bool,
    plans: bool,
) -> None:
    """Read a whole checkpoint or savepoint: its metadata, and the size and sha256 of each file.

    With -m or -f it also checks whether the pipeline in that code can be restored from it: its stages and inputs, the stateful
    operators and sources of their plans, and the installed version of Spark. For the plans, Spark runs in this process, with the
    settings of the code location's CheckpointCoordinatorResource, and the functions of the stages are called. Exit code 1 if
    there is a problem.
    """
    from dagster_checkpoints.spark.session.spark_version import installed_version

    with opened_for(options, location) as storage:
        stored = locate(storage, location)
        chosen = load_chosen(module, file, attribute, options.pipeline)
        pipeline = chosen[1] if chosen is not None else None
        report = verify_savepoint(
            storage,
            stored.location,
            pipeline,
            allow_non_restored_state=allow_non_restored_state,
            spark_version=installed_version() if pipeline is not None else "",
        )
        changes = report.changes
        if chosen is not None and plans:
            with prints_as_other_text():
                plan_problems, separate = _plan_problems(*chosen, report, stored.location)
            report, changes = replace(report, problems=(*report.problems, *plan_problems)), (*changes, *separate)
        if options.as_json:
            write_json(
                {
                    "url": report.url,
                    "location": stored.location,
                    "ok": report.ok,
                    "problems": report.problems,
                    "changes": changes,
                    "files": report.files,
                    "bytes": report.bytes,
                    "checked_against": pipeline.name if pipeline else None,
                }
            )
        else:
            write(*_as_text(report, changes, pipeline.name if pipeline else None))
    if not report.ok:
        click.get_current_context().exit(int(Exit.FAILED))


def _plan_problems(
    code: LoadedCode, pipeline: Pipeline, report: VerificationReport, location: str
) -> tuple[list[Problem], tuple[str, ...]]:
    """The problems of the stages' plans with the state, and which stages keep separate queries, in words.

    Both are empty if the pipeline does not fit for another reason.
    """
    from dagster_checkpoints.spark.job.pipeline_checks import check_plans
    from dagster_checkpoints.spark.session.spark_session import build_session
    from dagster_checkpoints.spark.snapshots.restored_state import Restored

    if report.metadata is None or report.plan is None:
        return [], ()
    queries = [task.query for chain in report.metadata.chains for task in chain.tasks.values() if task.query is not None]
    if all(query.sources is None for query in queries):  # a release that recorded no plans wrote it, or no query had begun
        return [], ()
    settings = {"spark.master": "local[1]", "spark.app.name": "dagster-checkpoints verify"}
    spark = build_session({**code.spark_settings(), **settings})
    try:
        checked = check_plans(pipeline, spark, Restored(report.plan, location))
    finally:
        spark.stop()
    changed = [Problem(error.kind, str(error)) for error in checked.changed]
    return [*changed, *(Problem("plan_not_built", str(error)) for error in checked.failed.values())], checked.changes


def _as_text(report: VerificationReport, changes: tuple[str, ...], pipeline: str | None) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    size = f"{count_of(report.files, 'file')}, {bytes_in_words(report.bytes)}"
    if report.ok:
        fits = f", and pipeline {pipeline} can be restored from it" if pipeline else ""
        return [Text("\n".join((report.url, f"{size}: all files are present and unchanged{fits}.", *changes)))]
    parts: list[RenderableType] = [
        Text(report.url),
        Text(f"{count_of(len(report.problems), 'problem')}; {size} named by its metadata" if report.metadata else "", "bold red"),
    ]
    for problem in report.problems:
        parts.append(Text.assemble(("✗ ", "red"), (problem.kind.replace("_", " "), "bold"), ": ", problem.what))
        lines = [problem.where, problem.remedy]
        parts.append(Padding(Text("\n".join(line for line in lines if line), style="dim"), (0, 0, 0, 2)))
    return parts
