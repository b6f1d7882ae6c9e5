"""`watch`: the progress of the running pipeline, live."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic, sleep
from typing import TYPE_CHECKING

import click

from dagster_checkpoints.cli.exits import Exit
from dagster_checkpoints.cli.output import console, seconds_in_words, write, write_json, write_json_line
from dagster_checkpoints.cli.status_view import current, status_as_json, status_as_text
from dagster_checkpoints.cli.storage_options import Seconds, StorageOptions, storage_options
from dagster_checkpoints.control.last_sign import SILENT_INTERVALS, LastSign, last_sign
from dagster_checkpoints.control.pipeline_control import OwnerWatch
from dagster_checkpoints.control.status import PipelineStatus, read_status
from dagster_checkpoints.errors import StorageUnavailable
from dagster_checkpoints.execution.pipeline_state import PipelineState
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

if TYPE_CHECKING:
    from rich.console import Group


@click.command()
@click.option("--once", is_flag=True, help="Show the progress once and end.")
@click.option(
    "--interval",
    type=Seconds(min=0.1),
    default=2.0,
    metavar="SECONDS",
    show_default=True,
    help="Pause between two reads of the storage.",
)
@storage_options
def watch(options: StorageOptions, once: bool, interval: float) -> None:
    """The progress of the pipeline: stages, rows, watermarks, checkpoints under way. Ends with the run, or with Ctrl-C.

    With --json: one document per line, whenever the progress has changed. Exit code 3 if the pipeline is not running, or its run
    has died: its process has ended, or it has not renewed its lease for the lease's whole length.
    """
    with options.open() as storage:
        watcher = _Watcher(options, storage)
        watcher.read()
        if once or not watcher.running or watcher.dead:
            watcher.show_once()
        elif options.as_json or not console().is_terminal:
            watcher.follow_lines(interval)
        else:
            watcher.follow_live(interval)
        if watcher.dead:
            click.echo(f"{storage.pipeline}: {watcher.dead}", err=True)
        sign = watcher.sign
        if not watcher.ever_ran or watcher.dead or (once and sign is not None and sign.dead):
            click.get_current_context().exit(int(Exit.NOT_RUNNING))


@dataclass
class _Watcher:
    """Reads a pipeline's state and status repeatedly, and shows them.

    Attributes:
        options: the options of the command.
        storage: storage of the pipeline.
        state: content of `state.json` at the last successful read.
        status: status of the running owner at that read; None if it has written none.
        rates: rows per second between the last two statuses, by stage.
        ever_ran: whether the pipeline was running at some read.
        dead: why the run that owns the pipeline can be taken for dead; "" if that is not known.
        owner: finds that out by the rules of a take-over: on another machine the clock may differ, so the age of the lease that
            is displayed does not end the command.
        storage_error: why the last read of the storage failed; "" if it succeeded.
        changed_at: monotonic seconds of the last read that showed a change.
    """

    options: StorageOptions
    storage: CheckpointStorage
    state: PipelineState | None = None
    status: PipelineStatus | None = None
    rates: dict[str, float] = field(default_factory=dict)
    ever_ran: bool = False
    dead: str = ""
    owner: OwnerWatch = field(default_factory=lambda: OwnerWatch(lambda: monotonic()))
    storage_error: str = ""
    changed_at: float = field(default_factory=lambda: monotonic())

    @property
    def running(self) -> bool:
        return self.state is not None and self.state.lease is not None

    @property
    def sign(self) -> LastSign | None:
        """The last sign of the run that owns the pipeline; None if no run does."""
        return last_sign(self.state, self.status, datetime.now(UTC)) if self.state is not None else None

    @property
    def overdue(self) -> bool:
        """Whether the run that owns the pipeline should have given a sign by now."""
        sign = self.sign
        return sign is not None and sign.overdue

    def read(self) -> bool:
        """Read state and status. Returns whether one of them has changed."""
        try:
            state, status = self.options.state(self.storage), read_status(self.storage)
        except StorageUnavailable as error:
            if self.state is None:
                raise
            self.storage_error = str(error)
            return False
        before = (self.state.token if self.state else "", self.status.sequence if self.status else -1)
        previous, self.state, self.status, self.storage_error = self.status, state, current(state, status), ""
        changed = before != (state.token, self.status.sequence if self.status else -1)
        if changed:
            self.changed_at = monotonic()
        if self.status is not None and previous is not None:
            self._measure(previous, self.status)
        self.ever_ran = self.ever_ran or self.running
        self.dead = self.owner.why_dead(state, state.epoch) if self.running else ""
        return changed

    def _measure(self, previous: PipelineStatus, status: PipelineStatus) -> None:
        seconds = (status.updated_at - previous.updated_at).total_seconds()
        if status.sequence == previous.sequence or seconds <= 0:
            return
        before = {stage.name: stage.rows for stage in previous.stages}
        # After a restart rows are counted from the checkpoint's: fewer than before.
        self.rates = {
            stage.name: max(stage.rows - known, 0) / seconds
            for stage in status.stages
            if stage.rows is not None and (known := before.get(stage.name)) is not None
        }

    def frame(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        assert self.state is not None
        parts = list(status_as_text(self.state, self.status, self.rates))
        notes = []
        if self.storage_error:
            notes.append(f"The last read of the storage failed: {self.storage_error}")
        unchanged = monotonic() - self.changed_at
        status_interval = self.status.interval if self.status else 5.0
        # Of two clocks that differ, the age of the last sign is not known: then this clock alone says it.
        if self.running and not self.overdue and unchanged > SILENT_INTERVALS * status_interval:
            notes.append(f"No new status for {seconds_in_words(unchanged)}: the run is busy or dead.")
        return Group(*parts, *(Text(note, style="yellow") for note in notes))

    def show_once(self) -> None:
        assert self.state is not None
        if self.options.as_json:
            write_json(status_as_json(self.state, self.status))
        else:
            write(*status_as_text(self.state, self.status))

    def follow_lines(self, interval: float) -> None:
        """Without a terminal: write the progress whenever it has changed, when the run gives no sign, and when it has died."""
        changed, overdue = True, False
        while True:
            if changed:
                assert self.state is not None
                if self.options.as_json:
                    write_json_line(status_as_json(self.state, self.status))
                else:
                    write(self.frame(), "")
            if not self.running or self.dead:
                return
            sleep(interval)
            changed, before = self.read(), overdue
            overdue = self.overdue
            changed = changed or (overdue and not before) or bool(self.dead)

    def follow_live(self, interval: float) -> None:
        """On a terminal: update the progress in place."""
        from rich.live import Live

        with Live(self.frame(), console=console(), auto_refresh=False, vertical_overflow="visible") as live:
            while self.running and not self.dead:
                sleep(interval)
                self.read()
                live.update(self.frame(), refresh=True)
