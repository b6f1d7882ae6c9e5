"""`report`: writes the page of checkpoints, or the same numbers as JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from dagster_checkpoints.cli.exits import UsageProblem
from dagster_checkpoints.cli.output import bytes_in_words, count_of, write, write_json
from dagster_checkpoints.cli.status_view import current, death_in_short
from dagster_checkpoints.cli.storage_options import StorageOptions, storage_options
from dagster_checkpoints.control.history import read_history
from dagster_checkpoints.control.last_sign import LastSign, last_sign
from dagster_checkpoints.control.status import PipelineStatus, read_status
from dagster_checkpoints.errors import CorruptStatus
from dagster_checkpoints.execution.pipeline_state import PipelineState, describe_end
from dagster_checkpoints.report.building import as_json, build_report, page
from dagster_checkpoints.report.values import PipelineReport
from dagster_checkpoints.storage.checkpoints import CheckpointStorage


@click.command()
@click.option(
    "--output", "-o", metavar="FILE", help="The file to write. Default: <pipeline>-checkpoints.html in the current directory."
)
@storage_options
def report(options: StorageOptions, output: str | None) -> None:
    """Write the page of checkpoints: overview, graph, history, summary, time line and configuration.

    One HTML file that needs no server and no network. It shows the latest 10,000 checkpoints of all runs. A running pipeline
    writes such a page itself, report.html in its directory. With --json the same numbers go to standard output.
    """
    with options.open() as storage:
        made = _report(storage, options.state(storage))
    if options.as_json and output is None:
        write_json(as_json(made))
        return
    file = Path(output or f"{made.pipeline}-checkpoints.html")
    content = page(made)
    try:
        file.write_bytes(content)
    except OSError as error:
        raise UsageProblem(f"expected a file that can be written as --output, found {file}: {error}") from error
    written = {"file": str(file.resolve()), "bytes": len(content), "checkpoints": len(made.checkpoints)}
    if options.as_json:
        write_json(written)
        return
    write(f"{file.resolve()}: {count_of(len(made.checkpoints), 'checkpoint')}, {bytes_in_words(len(content))}")
    for problem in made.problems:
        click.echo(f"{click.style('warning:', fg='yellow', bold=True)} {problem}", err=True)


def _report(storage: CheckpointStorage, state: PipelineState) -> PipelineReport:
    entries, problems = read_history(storage)
    status: PipelineStatus | None = None
    try:
        status = read_status(storage)
    except CorruptStatus as error:
        problems = (*problems, str(error))
    now = datetime.now(UTC)
    sign = last_sign(state, current(state, status), now)
    return build_report(
        pipeline=state.pipeline,
        url=storage.url,
        entries=entries,
        status=status,
        state=_in_words(state, current(state, status), sign),
        running_epoch=state.epoch if sign is not None and not sign.dead else None,
        now=now,
        problems=problems,
    )


def _in_words(state: PipelineState, status: PipelineStatus | None, sign: LastSign | None) -> str:
    if sign is None:
        return describe_end(state)
    if sign.dead:
        return death_in_short(sign)
    phase = status.phase if status is not None else "starting"
    return f"{phase}, last sign overdue" if sign.overdue else phase
