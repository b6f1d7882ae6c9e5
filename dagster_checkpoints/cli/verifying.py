"""`verify`: is a checkpoint or savepoint whole, and does it fit a pipeline?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dagster_checkpoints.cli.exits import Exit
from dagster_checkpoints.cli.finding import WHAT, find, opened_for
from dagster_checkpoints.cli.loading import code_options, load_pipeline
from dagster_checkpoints.cli.output import bytes_in_words, count_of, write, write_json
from dagster_checkpoints.cli.where import Where, storage_options
from dagster_checkpoints.verification import VerificationReport, verify_savepoint

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command(epilog=WHAT)
@click.argument("location")
@code_options
@click.option("--allow-non-restored-state", is_flag=True, help="State of stages that the pipeline no longer has is no problem.")
@storage_options
def verify(
    where: Where,
    location: str,
    module: str | None,
    file: str | None,
    attribute: str | None,
    allow_non_restored_state: bool,
) -> None:
    """Read all of a checkpoint or savepoint: metadata, and each file's size and sha256.

    With -m or -f also whether the pipeline in that code can be restored from it. Exit code 1 if anything is wrong.
    """
    with opened_for(where, location) as storage:
        found = find(storage, location)
        pipeline = load_pipeline(module, file, attribute, where.pipeline)
        report = verify_savepoint(storage, found.location, pipeline, allow_non_restored_state=allow_non_restored_state)
        if where.as_json:
            write_json(
                {
                    "url": report.url,
                    "location": found.location,
                    "ok": report.ok,
                    "problems": report.problems,
                    "files": report.files,
                    "bytes": report.bytes,
                    "checked_against": pipeline.name if pipeline else None,
                }
            )
        else:
            write(*_as_text(report, pipeline.name if pipeline else None))
    if not report.ok:
        click.get_current_context().exit(int(Exit.FAILED))


def _as_text(report: VerificationReport, pipeline: str | None) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    size = f"{count_of(report.files, 'file')}, {bytes_in_words(report.bytes)}"
    if report.ok:
        fits = f", and pipeline {pipeline} can be restored from it" if pipeline else ""
        return [Text(f"{report.url}\n{size}: all there and unchanged{fits}.")]
    parts: list[RenderableType] = [
        Text(report.url),
        Text(f"{count_of(len(report.problems), 'problem')}; {size} named by its metadata" if report.metadata else "", "bold red"),
    ]
    for problem in report.problems:
        parts.append(Text.assemble(("✗ ", "red"), (problem.kind.replace("_", " "), "bold"), ": ", problem.what))
        more = [problem.where, problem.remedy]
        parts.append(Padding(Text("\n".join(line for line in more if line), style="dim"), (0, 0, 0, 2)))
    return parts
