"""`check`: whether the stages of a pipeline can run. Builds and checks every plan, without data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dagster_checkpoints.cli.exits import Exit
from dagster_checkpoints.cli.loading import CodeNotImported, LoadedCode, code_options, load_code
from dagster_checkpoints.cli.output import JSON, count_of, prints_as_other_text, write, write_json
from dagster_checkpoints.pipeline import Pipeline, Stage

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dagster_checkpoints.spark.query.plan_report import PlanReport


@click.command()
@code_options
@click.option("--pipeline", metavar="NAME", help="Only the pipeline of this name. Default: all pipelines in the code.")
@click.option("--without-sinks", is_flag=True, help="Check plans only, on a machine that does not reach the sinks.")
@click.option("--json", "as_json", is_flag=True, help="JSON, for programs.")
def check(
    module: str | None, file: str | None, attribute: str | None, pipeline: str | None, without_sinks: bool, as_json: bool
) -> None:
    """Build and check the plan of every stage, as a run would at its start, and its sink. For continuous integration.

    The functions of the stages are called, so the inputs that a source opens have to exist; they are not read. Of each sink it is
    checked that its place can be written and that the columns of the stage fit: nothing stays behind, and no table is created. A
    sink that cannot be reached gives a warning. No storage is used. Spark runs in this process, with the settings of the code
    location's CheckpointCoordinatorResource and one core. Exit code 1 if a stage cannot run or the code cannot be imported.
    """
    click.get_current_context().find_root().meta[JSON] = as_json
    try:
        code = load_code(module, file)
    except CodeNotImported as error:
        _report_import(error, as_json)
        click.get_current_context().exit(int(Exit.FAILED))
    pipelines = code.one_or_more(attribute, pipeline)
    with prints_as_other_text():
        reports = _reports(code, pipelines, sinks=not without_sinks)
    if as_json:
        write_json(
            {
                "ok": all(report.ok for report in reports),
                "pipelines": [_as_json(*pair) for pair in zip(pipelines, reports, strict=True)],
            }
        )
    else:
        for checked, report in zip(pipelines, reports, strict=True):
            write(*_as_text(checked, report))
    if not all(report.ok for report in reports):
        click.get_current_context().exit(int(Exit.FAILED))


def _reports(code: LoadedCode, pipelines: list[Pipeline], *, sinks: bool) -> list[PlanReport]:
    from dagster_checkpoints.spark.job.pipeline_checks import check_plans, check_sinks
    from dagster_checkpoints.spark.session.spark_session import build_session, check_session

    code.check_settings()
    settings = code.spark_settings()
    spark = build_session({**settings, "spark.master": "local[1]", "spark.app.name": "dagster-checkpoints check"})
    try:
        reports = [check_plans(pipeline, spark) for pipeline in pipelines]
        check_session(spark)  # the stages' functions have run by now
        for pipeline, report in zip(pipelines, reports, strict=True):
            if sinks:
                check_sinks(pipeline, spark, report)
        return reports
    finally:
        spark.stop()


def _report_import(error: CodeNotImported, as_json: bool) -> None:
    if as_json:
        write_json({"ok": False, "pipelines": [], "error": str(error)})
    click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True)


def _as_json(pipeline: Pipeline, report: PlanReport) -> dict[str, Any]:
    stages = []
    for stage in pipeline.stages:
        entry: dict[str, Any] = {"name": stage.name, "location": str(stage.location), "result": _result(stage, report)}
        if stage.name in report.failed:
            error = report.failed[stage.name]
            entry |= {"error": type(error).__name__, "message": str(error)}
        elif stage.name in report.unchecked:
            entry["because_of"] = report.unchecked[stage.name]
        if stage.name in report.apart:
            entry["own_query"] = report.apart[stage.name]
        stages.append(entry)
    queries = [list(chain.stages) for chain in report.chains]
    return {"name": pipeline.name, "ok": report.ok, "stages": stages, "queries": queries, "warnings": report.warnings}


def _result(stage: Stage, report: PlanReport) -> str:
    if stage.name in report.failed:
        return "failed"
    return "unchecked" if stage.name in report.unchecked else "passed"


_MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "unchecked": ("?", "yellow")}


def _as_text(pipeline: Pipeline, report: PlanReport) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    width = max(len(stage.name) for stage in pipeline.stages)
    parts: list[RenderableType] = [Text(f"pipeline {pipeline.name}", "bold")]
    for stage in pipeline.stages:
        result = _result(stage, report)
        note = ""
        if result == "unchecked":
            note = f"not checked: correct {report.unchecked[stage.name]} first"
        if stage.name in report.apart:
            note = f"{note or stage.location}; begins a query of its own: {report.apart[stage.name]}"
        parts.append(Text.assemble(_MARKS[result], f" {stage.name:<{width}}  ", (note or str(stage.location), "dim")))
        if stage.name in report.failed:
            parts.append(Padding(Text(str(report.failed[stage.name])), (0, 0, 0, 4)))
    parts += [Text.assemble(("! ", "yellow"), warning) for warning in report.warnings]
    parts.append(
        Text(
            f"{len(report.passed)} of {count_of(len(pipeline.stages), 'stage')} can run, in "
            f"{count_of(len(report.chains), 'Spark query', 'Spark queries')}; {count_of(len(report.warnings), 'warning')}."
        )
    )
    return parts
