"""`health`: whether the pipeline is healthy, for people, cron and probes."""

from __future__ import annotations

from datetime import UTC, datetime
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import click

from dagster_checkpoints.cli.exits import Exit
from dagster_checkpoints.cli.output import table, write, write_json
from dagster_checkpoints.cli.storage_options import Seconds, StorageOptions, asked_by, storage_options
from dagster_checkpoints.control.health import (
    COUNTS,
    DEFAULT_THRESHOLDS,
    HealthMemory,
    HealthProblem,
    HealthThresholds,
    health_of,
)
from dagster_checkpoints.control.pipeline_control import PipelineControl, newest_status
from dagster_checkpoints.execution.pipeline_state import describe_end
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_SECONDS = 60.0


_RULES = {
    "failed_checkpoints": "consecutive checkpoints that have failed",
    "checkpoint_intervals": "intervals without a completed checkpoint",
    "slow_checkpoint": "seconds that the newest checkpoint took (a warning)",
    "standing_watermark": "seconds in which rows are emitted and the watermark stands still; needs --during",
    "growing_lag": "looks in a row with more unread messages each time; needs --during",
    "growing_state": "looks in a row with a larger checkpoint each time (a warning); needs --during",
    "late_rows": "late rows between two looks (a warning); needs --during",
    "silent_source": "seconds for which a source has not answered",
    "restarts": "restarts; needs --during",
}


def _threshold_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each threshold; 0 switches its rule off."""
    for name in reversed(HealthThresholds.__struct_fields__):
        default = getattr(DEFAULT_THRESHOLDS, name)
        kind: type = int if name in COUNTS else float
        shown = f"{default:g}" if default is not None else "no rule"
        text = f"Unhealthy from: {_RULES[name]}; 0 for no rule.  [default: {shown}]"
        option = click.option(f"--{name.replace('_', '-')}", name, type=kind, default=default, help=text, metavar="N")
        command = option(command)
    return command


@click.command()
@click.option(
    "--during",
    type=Seconds(min=0),
    default=0.0,
    metavar="SECONDS",
    show_default=True,
    help="Look once a minute for so long: some rules need several looks.",
)
@_threshold_options
@storage_options
def health(options: StorageOptions, during: float, **given: float | None) -> None:
    """Whether the pipeline is healthy. Exit code 0: it is; 1: it is not; 3: it does not run, and has not failed.

    Warnings do not count for the exit code. Reads nothing but the storage, and does not disturb the run.
    """
    thresholds = HealthThresholds(**{name: value or None for name, value in given.items()})  # type: ignore[arg-type]
    with options.open() as storage:
        problems, running, end = _look(options, storage, thresholds, during)
    if options.as_json:
        write_json({"healthy": not _errors(problems), "running": running, "problems": problems})
    elif problems:
        shown = table("severity", "rule", "what was found", keep=["severity", "rule"])
        for problem in problems:
            shown.add_row(problem.severity, problem.name, problem.text)
        write(shown)
    else:
        write("healthy" if running else end)
    if _errors(problems):
        click.get_current_context().exit(int(Exit.FAILED))
    if not running:
        click.get_current_context().exit(int(Exit.NOT_RUNNING))


def _now() -> datetime:
    return datetime.now(UTC)


def _errors(problems: list[HealthProblem]) -> list[HealthProblem]:
    return [problem for problem in problems if problem.severity == "error"]


def _look(
    options: StorageOptions, storage: CheckpointStorage, thresholds: HealthThresholds, during: float
) -> tuple[list[HealthProblem], bool, str]:
    """The problems at the last look, whether the pipeline runs, and the end of its latest job."""
    until, memory, control = monotonic() + during, HealthMemory(), PipelineControl(storage, asked_by=asked_by())
    while True:
        state = options.state(storage)
        problems, memory = health_of(state, newest_status(control), memory, thresholds, _now())
        left = until - monotonic()
        if left <= 0 or state.lease is None:
            return problems, state.lease is not None, describe_end(state)
        sleep(min(_LOOK_SECONDS, left))
