"""Writes a run's entries of the pipeline's history, and the report while the run lives. On the thread that writes the status.

It must not fail the job, nor cost much: entries are written when there are some, the page about once a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dagster_checkpoints.control.history import Entries, StageSample
from dagster_checkpoints.control.history_segments import HistorySegments
from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.report.building import build_report
from dagster_checkpoints.report.page import page
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

PAGE_SECONDS = 60.0
"""Seconds between two versions of the page."""
_ENTRIES_SECONDS = 15.0
"""Seconds for which entries wait, so that a file that grows is not written with every status."""


class HistoryWriter:
    """Writes for one run; all methods are for one thread.

    Args:
        storage: The storage of the pipeline; this run owns the pipeline.
        epoch: Epoch of the run.
        log: Receives a warning if the history or the page cannot be written.
        monotonic: Monotonic seconds.
    """

    def __init__(self, storage: CheckpointStorage, epoch: int, log: logging.Logger, monotonic: Callable[[], float]) -> None:
        self._storage = storage
        self._epoch = epoch
        self._log = log
        self._monotonic = monotonic
        self._segments = HistorySegments(storage, epoch)
        self._waiting: list[Entries] = []
        self._entries_due = self._page_due = monotonic()
        self._news = True
        self._shown: dict[str, StageSample] = {}
        self._failing = False

    def add(self, entries: Entries) -> None:
        """Take the run's latest entries, for the next `write`."""
        if entries:
            self._waiting.append(entries)

    def write(self, status: PipelineStatus) -> None:
        """Write what is due; everything if the run has ended. Logs failures, and raises none.

        Args:
            status: The status of the run.
        """
        now, ended = self._monotonic(), status.phase == "ended"
        try:
            if self._waiting and (ended or now >= self._entries_due or any(each.events for each in self._waiting)):
                self._entries_due = now + _ENTRIES_SECONDS
                waiting, self._waiting = Entries.joined(self._waiting), []
                self._news = self._news or bool(waiting.checkpoints or waiting.events) or self._moved(waiting)
                self._segments.append(waiting)
            if self._news and (ended or (now >= self._page_due and status.stages)):
                self._page_due = now + PAGE_SECONDS
                self._write_page(status, ended)
                self._news = False
            self._failing = False
        except Exception as error:  # the history is for display: nothing that goes wrong with it may reach the job
            if not self._failing:
                self._log.warning("The history of the pipeline cannot be written now. %s: %s", type(error).__name__, error)
            self._failing = True

    def _write_page(self, status: PipelineStatus, ended: bool) -> None:
        report = build_report(
            pipeline=status.pipeline,
            url=self._storage.url,
            entries=self._segments.latest(),
            status=status,
            state="the run has ended" if ended else status.phase,
            running_epoch=None if ended else self._epoch,
            now=status.updated_at,
            refresh_seconds=None if ended else PAGE_SECONDS,
            problems=self._segments.problems,
        )
        self._storage.store.put(self._storage.layout.report, page(report))

    def _moved(self, entries: Entries) -> bool:
        """Whether a stage has moved since the newest sample of the last entries."""
        before, self._shown = self._shown, entries.samples[-1].stages if entries.samples else self._shown
        return before != self._shown
