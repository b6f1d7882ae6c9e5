"""The suite that every sink has to pass, also a user's own: rows become visible once, with the checkpoint that holds them."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Literal

from dagster_checkpoints.sinks import SinkError, TwoPhaseCommitSink
from dagster_checkpoints.testing.model_job import ModelCheckpoint, ModelJob


class SinkConformance(ABC):
    """Tests of a two-phase-commit sink, for pytest: subclass it in a test file, under a name that begins with ``Test``.

    The rows have a column ``n`` (`int64`), which is different in each row, and a column ``text``. They reach the sink as Parquet
    files, without a Spark session, and the files are deleted after each call. The crash test starts processes that load the
    test's file by its path.

    Attributes:
        older_restore: what a restore does after later checkpoints of the same job were committed. ``takes_back``: their rows
            vanish, and come back if a later savepoint is restored; ``refuses``: ``recover`` raises a SinkError and changes
            nothing; ``rewrites``: the rows stay, and the job writes them again without doubling them, for example by key.
        new_start: what ``make_sink``'s sink does at a new start with the rows of an earlier job.
        crash_points: number of moments at which the crash test kills the job.

    Examples:
        >>> class TestRowsSink(SinkConformance):
        ...     older_restore = "refuses"
        ...
        ...     def make_sink(self, folder):
        ...         return RowsSink(folder / "rows")
        ...
        ...     def read(self, folder):
        ...         return [row["n"] for row in read_rows(folder / "rows")]
    """

    older_restore: ClassVar[Literal["takes_back", "refuses", "rewrites"]] = "takes_back"
    new_start: ClassVar[Literal["refuse", "keep", "replace"]] = "refuse"
    crash_points: ClassVar[int] = 16

    @abstractmethod
    def make_sink(self, folder: Path) -> TwoPhaseCommitSink:
        """The configured sink, whose target belongs to this directory; each call for the same directory means the same target.

        Args:
            folder: an empty directory at the first call. A sink that writes to a server derives a name from it.
        """

    @abstractmethod
    def read(self, folder: Path) -> Sequence[int]:
        """The column ``n`` of all rows that readers of the target see now, in any order; none if there is no table yet."""

    # One job

    def test_rows_are_visible_with_the_commit_and_not_before(self, tmp_path: Path) -> None:
        job = self._job(tmp_path, instances=2)
        job.start()
        for checkpoint_id in (1, 2):
            before = self._rows(tmp_path)
            for index in (0, 1, 0):
                job.write(3, index)
            assert self._rows(tmp_path) == before
            taken = job.snapshot(checkpoint_id)
            assert self._rows(tmp_path) == before
            job.commit(checkpoint_id)
            assert self._rows(tmp_path) == taken.visible
        job.close()
        assert self._rows(tmp_path) == taken.visible

    def test_transactions_are_text_that_any_process_can_commit_again(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(3)
        first = job.checkpoint(1)
        job.write(2)
        second = job.checkpoint(2)
        (transaction,) = first.transactions[0]
        assert transaction.encode().decode() == transaction
        again = self._job(tmp_path)
        again.start(second, epoch=2)
        for each in (*second.transactions[0], transaction):  # repeated, and the older one last
            again.sinks[0]._sink.commit(each)
        assert self._rows(tmp_path) == second.visible
        job.close()

    def test_what_an_aborted_checkpoint_holds_is_committed_with_the_next(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        for checkpoint_id in (1, 2):
            job.write(2)
            job.snapshot(checkpoint_id)
        job.write(2)
        taken = job.checkpoint(3)
        assert len(taken.transactions[0]) == 3
        assert self._rows(tmp_path) == taken.visible

    def test_a_checkpoint_without_rows(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        assert self._rows(tmp_path) == job.checkpoint(1).visible == []
        job.write(1)
        taken = job.checkpoint(2)
        assert job.checkpoint(3).visible == self._rows(tmp_path) == taken.visible

    def test_a_batch_that_is_written_again_replaces_its_rows(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write_numbers([0, 1, 2], batch_id=0)
        job.write_numbers([3], batch_id=1)
        job.write_numbers([3, 4], batch_id=1)
        job.checkpoint(1)
        assert self._rows(tmp_path) == [0, 1, 2, 3, 4]

    def test_a_commit_counts_its_rows(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(3)
        job.write(4)
        job.snapshot(1)
        (report,) = job.commit(1)
        assert report.rows in (7, None)

    def test_the_end_of_the_data(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(3)
        job.finish()
        final = job.snapshot(1, finished=True)
        job.commit(1)
        job.close()
        assert self._rows(tmp_path) == final.visible
        job.close()

    # Restores

    def test_a_restart_drops_what_no_completed_checkpoint_holds(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        completed = job.checkpoint(1)
        job.write(2)
        job.snapshot(2)
        job.write(2)
        again = self._job(tmp_path)
        again.start(completed, epoch=2)
        assert self._rows(tmp_path) == completed.visible
        again.write(5)
        taken = again.checkpoint(2)  # the same id: no checkpoint with it has completed
        assert self._rows(tmp_path) == taken.visible

    def test_a_restart_commits_what_the_completed_checkpoint_holds(self, tmp_path: Path) -> None:
        job = self._job(tmp_path, instances=2)
        job.start()
        for index in (0, 1):
            job.write(2, index)
        job.snapshot(1)
        job.write(1, 1)
        completed = job.snapshot(2)
        for epoch in (2, 3):
            again = self._job(tmp_path, instances=2)
            again.start(completed, epoch=epoch)
            assert self._rows(tmp_path) == completed.visible

    def test_an_older_checkpoint_is_restored(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        older = job.checkpoint(1)
        job.write(2)
        later = job.checkpoint(2, savepoint=True)
        job.write(2)
        newest = job.checkpoint(3)
        again = self._job(tmp_path)
        if self.older_restore == "refuses":
            self._assert_refused(again, older)
            assert self._rows(tmp_path) == newest.visible
            return
        again.start(older, epoch=2)
        takes_back = self.older_restore == "takes_back"
        assert self._rows(tmp_path) == (older if takes_back else newest).visible
        again.write(7)
        taken = again.checkpoint(4)
        assert self._rows(tmp_path) == taken.visible
        self._job(tmp_path).start(taken, epoch=3)
        assert self._rows(tmp_path) == taken.visible  # rows of the abandoned checkpoints 2 and 3 stay hidden
        forward = self._job(tmp_path)
        forward.start(later, epoch=4)
        assert self._rows(tmp_path) == (later if takes_back else taken).visible
        forward.write(8)
        taken = forward.checkpoint(5)
        assert self._rows(tmp_path) == taken.visible

    def test_a_savepoint_is_restored_after_its_transactions_were_aborted(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        completed = job.checkpoint(1)
        job.write(3)
        savepoint = job.snapshot(2, savepoint=True)
        self._job(tmp_path).start(completed, epoch=2)
        again = self._job(tmp_path)
        again.start(savepoint, epoch=3)
        assert self._rows(tmp_path) == savepoint.visible
        again.write(1)
        taken = again.checkpoint(3)
        assert self._rows(tmp_path) == taken.visible

    # New starts and owners

    def test_a_new_start_after_an_earlier_job(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.sink.check_new_start(job.context(0, epoch=1, attempt=""))
        job.start()
        job.write(2)
        earlier = job.checkpoint(1)
        later = self._job(tmp_path)
        context = later.context(0, epoch=2, job_id=2, attempt="")
        if self.new_start == "refuse":
            with _raises_sink_error("check_new_start"):
                later.sink.check_new_start(context)
            assert self._rows(tmp_path) == earlier.visible
            return
        later.sink.check_new_start(context)
        assert self._rows(tmp_path) == earlier.visible
        later.start(None, epoch=2, job_id=2)
        kept = earlier.visible if self.new_start == "keep" else []
        assert self._rows(tmp_path) == kept
        later.write(3)
        taken = later.checkpoint(2)
        assert self._rows(tmp_path) == sorted(
            {*kept, *taken.visible} if self.older_restore == "rewrites" else kept + taken.visible
        )

    def test_a_new_job_that_crashed_before_its_first_checkpoint_begins_again(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        job.snapshot(1)
        again = self._job(tmp_path)
        again.start(epoch=2)
        assert self._rows(tmp_path) == []
        again.write(3)
        assert again.checkpoint(1).visible == self._rows(tmp_path)

    def test_an_owner_that_was_replaced_changes_nothing(self, tmp_path: Path) -> None:
        older = self._job(tmp_path)
        older.start(epoch=1)
        older.write(2)
        completed = older.checkpoint(1)
        older.write(2)
        newer = self._job(tmp_path)
        newer.start(completed, epoch=2)
        newer.write(3)
        taken = newer.snapshot(2)
        with suppress(Exception):  # any error ends the older owner's attempt
            older.write(1)
            older.snapshot(2)
        with suppress(Exception):
            older.sinks[0]._sink.commit(completed.transactions[0][0])
        with suppress(Exception):
            self._job(tmp_path).start(completed, epoch=1)
        older.close()
        assert self._rows(tmp_path) == completed.visible
        newer.commit(2)
        assert self._rows(tmp_path) == taken.visible

    def test_the_configured_sink_can_be_pickled(self, tmp_path: Path) -> None:
        job = ModelJob(pickle.loads(pickle.dumps(self._job(tmp_path).sink)), tmp_path / "job")
        job.start()
        job.write(2)
        assert job.checkpoint(1).visible == self._rows(tmp_path)

    # The whole

    def test_readers_see_whole_checkpoints_at_every_moment(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        seen: list[list[int]] = []
        failed: list[str] = []
        ended = threading.Event()

        def poll() -> None:
            try:
                while not ended.is_set():
                    seen.append(self._rows(tmp_path))
            except Exception:
                failed.append(traceback.format_exc())

        reader = threading.Thread(target=poll, daemon=True)
        job.start()
        reader.start()
        may_see: list[list[int]] = [[]]
        for checkpoint_id in range(1, 13):
            job.write(2)
            job.write(3)
            may_see.append(job.checkpoint(checkpoint_id).visible)
        ended.set()
        reader.join(60)
        assert not failed, f"expected a reader at every moment to read the rows, found that it failed: {failed[0]}"
        assert not reader.is_alive(), "expected a reader to end within 60 s, found that it still reads"
        assert seen and [rows for rows in seen if rows not in may_see] == []
        assert [len(rows) for rows in seen] == sorted(len(rows) for rows in seen)

    def test_a_job_that_is_killed_at_any_moment(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "dagster_checkpoints.testing.crashes", inspect.getfile(type(self)), type(self).__name__]
        ended = subprocess.run(
            [*command, str(tmp_path), str(self.crash_points), "0"], capture_output=True, text=True, timeout=1200, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        wrong = json.loads(ended.stdout.splitlines()[-1])
        assert wrong == [], "\n".join(wrong)

    def _job(self, folder: Path, instances: int = 1) -> ModelJob:
        target = folder / "target"
        target.mkdir(exist_ok=True)
        return ModelJob(self.make_sink(target), folder / "job", instances)

    def _rows(self, folder: Path) -> list[int]:
        return sorted(self.read(folder / "target"))

    def _assert_refused(self, job: ModelJob, restored: ModelCheckpoint) -> None:
        with _raises_sink_error("recover"):
            job.start(restored, epoch=2)


class _raises_sink_error:
    def __init__(self, call: str) -> None:
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        assert kind is not None, f"expected {self._call} to raise a SinkError, but it returned"
        return issubclass(kind, SinkError)
