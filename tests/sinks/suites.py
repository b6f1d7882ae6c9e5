"""The suites that our sinks have to pass beside the one that every sink has to pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from dagster_checkpoints.sinks import (
    SinkAheadOfStorage,
    SinkCannotTakeBack,
    SinkContext,
    SinkFenced,
    SinkNotOpen,
    SinkTargetChanged,
    SinkTransactionLost,
    UnreadableSinkTransaction,
)
from dagster_checkpoints.testing import SinkConformance
from dagster_checkpoints.testing.model_job import ModelJob


class OfAnotherStorage(ModelJob):
    """A job whose checkpoints are in another storage, which counts jobs and epochs from 1."""

    def context(self, index: int, epoch: int, job_id: int = 1, attempt: str | None = None) -> SinkContext:
        return dataclasses.replace(super().context(index, epoch, job_id, attempt), history="other")


class OfOlderStorage(ModelJob):
    """A job whose checkpoint storage has recorded no checkpoint after 2."""

    def context(self, index: int, epoch: int, job_id: int = 1, attempt: str | None = None) -> SinkContext:
        return dataclasses.replace(super().context(index, epoch, job_id, attempt), highest_checkpoint_id=2)


class TargetConformance(SinkConformance):
    """What a sink promises whose life the engine drives: what it refuses, it refuses by name, and changes nothing."""

    def test_an_owner_that_was_replaced_is_refused_in_every_call(self, tmp_path: Path) -> None:
        late, newer = self._job(tmp_path), self._job(tmp_path)
        late.start(epoch=6)
        late.write(2)
        held = late.snapshot(1)
        newer.start(held, epoch=7)
        newer.write(3)
        waiting = newer.snapshot(2)
        sink: Any = late.sinks[0]._sink
        for act in (
            lambda: sink.abort(waiting.transactions[0][0]),
            lambda: sink.commit(held.transactions[0][0]),
            lambda: sink.transaction_files(waiting.transactions[0][0]),
            lambda: sink.recover([]),
            lambda: sink.recover([], restored=0),
            sink.start_new,
            lambda: self._job(tmp_path).start(held, epoch=6),
        ):
            with pytest.raises(SinkFenced, match=r"epoch 6.*epoch 7.*changes nothing"):
                act()
            assert self._rows(tmp_path) == held.visible
        newer.commit(2)
        assert self._rows(tmp_path) == waiting.visible

    def test_a_checkpoint_storage_that_is_an_older_copy_is_refused(self, tmp_path: Path) -> None:
        """Its job would use the ids of committed checkpoints again, and their new rows would not be committed."""
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        second = job.checkpoint(2)
        OfOlderStorage(job.sink, tmp_path / "same").start(second, epoch=2)
        job.start(second, epoch=2)
        job.write(1)
        third = job.checkpoint(3)
        job.write(4)
        waiting = job.snapshot(4)
        for restored in (second, None):
            with pytest.raises(SinkAheadOfStorage, match=r"after 2, .*has committed checkpoint 3: .*Nothing was changed"):
                OfOlderStorage(job.sink, tmp_path / "older").start(restored, epoch=2)
        assert self._rows(tmp_path) == third.visible
        job.commit(4)
        assert self._rows(tmp_path) == waiting.visible

    def test_a_target_without_the_rows_that_the_checkpoint_knows_as_committed_is_refused(self, tmp_path: Path) -> None:
        """It is empty, or an older copy: the missing rows would not be written again."""
        job, elsewhere = self._job(tmp_path, instances=2), tmp_path / "elsewhere"
        elsewhere.mkdir()
        job.start()
        job.write(2)
        first = job.checkpoint(1)
        job.write(1)
        second = job.checkpoint(2)
        assert first.committed == (None, None) and second.committed == (first.transactions[0][0], None)
        job.close()
        other = self._job(elsewhere, instances=2)
        with pytest.raises(SinkTargetChanged, match=r"instance 0 .*job 1.history up to checkpoint 1 are committed, found none"):
            other.start(second, epoch=2)
        assert self._rows(elsewhere) == []
        other.start(epoch=3, job_id=2)
        other.close()
        with pytest.raises(SinkTargetChanged, match="found none of that job"):
            other.start(second, epoch=4)
        job.start(second, epoch=5)
        assert self._rows(tmp_path) == second.visible
        job.close()

    def test_epochs_and_jobs_of_another_storage_are_others(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start(epoch=9)
        job.write(2)
        earlier = job.checkpoint(1).visible
        job.write(2)
        job.snapshot(2)
        for epoch in (1, 2):  # the second time after a crash
            other = OfAnotherStorage(job.sink, tmp_path / "other")
            other.start(epoch=epoch)
            kept = [] if self.new_start == "replace" else earlier
            assert self._rows(tmp_path) == kept
        other.write(3)
        taken = other.checkpoint(1).visible
        assert self._rows(tmp_path) == sorted(kept + taken if job.sink.appends else {*kept, *taken})

    def test_a_savepoint_that_another_job_continues_is_no_new_start(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        completed = job.checkpoint(1)
        job.write(3)
        savepoint = job.snapshot(2, savepoint=True)
        self._job(tmp_path).start(completed, epoch=2)  # aborts its transaction
        for epoch in (3, 4):  # the second time after a crash
            new = self._job(tmp_path)
            new.start(savepoint, epoch=epoch, job_id=2, own=False)
            assert self._rows(tmp_path) == savepoint.visible
        new.write(1)
        taken = new.checkpoint(3)
        assert self._rows(tmp_path) == taken.visible

    def test_a_text_of_another_kind_place_or_instance_is_refused(self, tmp_path: Path) -> None:
        job = self._job(tmp_path, instances=2)
        job.start()
        job.write(1, 1)
        taken = job.snapshot(1)
        first, second = (each._sink for each in job.sinks)
        (text,) = taken.transactions[1]

        def changed(**fields: Any) -> str:
            return msgspec.json.encode(msgspec.json.decode(text) | fields).decode()

        for call in (second.commit, second.abort):
            for other in ("", "{", "{}", '{"sink": "another"}', changed(sink="another")):
                with pytest.raises(UnreadableSinkTransaction, match="kind of sink"):
                    call(other)
            with pytest.raises(UnreadableSinkTransaction, match="wrote to another place"):
                call(changed(place="elsewhere"))
        with pytest.raises(UnreadableSinkTransaction, match=r"instance 0 .*of instance 1"):
            first.commit(text)
        second.commit(text)
        assert self._rows(tmp_path) == taken.visible

    def test_an_aborted_transaction_is_lost(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        ((text,),) = job.snapshot(1).transactions
        for _ in range(2):
            job.sinks[0]._sink.abort(text)
        with pytest.raises(SinkTransactionLost, match=r"checkpoint 1|pre-committed transaction in"):
            job.sinks[0]._sink.commit(text)
        assert self._rows(tmp_path) == []

    def test_a_closed_sink_keeps_what_is_pre_committed(self, tmp_path: Path) -> None:
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        taken = job.snapshot(1)
        job.write(1)
        for _ in range(2):
            job.close()
        for call in (lambda: job.write(1), lambda: job.snapshot(2), lambda: job.commit(1)):
            with pytest.raises(SinkNotOpen):
                call()
        self._job(tmp_path).start(taken, epoch=2)
        assert self._rows(tmp_path) == taken.visible


class ReplacesByKey(TargetConformance):
    older_restore = "rewrites"
    new_start = "keep"
    settings: ClassVar[dict[str, Any]] = {"key": "n", "at_new_start": "keep"}

    def test_an_older_checkpoint_is_restored(self, tmp_path: Path) -> None:
        """And a savepoint of an abandoned branch is refused: rows between may have been replaced by older ones."""
        job = self._job(tmp_path)
        job.start()
        job.write(2)
        older = job.checkpoint(1)
        job.write(2)
        later = job.checkpoint(2, savepoint=True)
        again = self._job(tmp_path)
        again.start(older, epoch=2)
        assert self._rows(tmp_path) == later.visible
        again.write(1)
        taken = again.checkpoint(4)
        assert self._rows(tmp_path) == later.visible
        with pytest.raises(SinkCannotTakeBack, match="checkpoint 2 "):
            self._job(tmp_path).start(later, epoch=3)
        forward = self._job(tmp_path)
        forward.start(taken, epoch=4)
        forward.write(7)
        assert forward.checkpoint(5).visible == self._rows(tmp_path)


class ReplacesPartitions(TargetConformance):
    new_start = "keep"
    test_a_savepoint_that_another_job_continues_is_no_new_start = None  # refused: see test_lake_partitions.py
    settings: ClassVar[dict[str, Any]] = {"partition_by": "text", "overwrite_partitions": True, "at_new_start": "keep"}

    def test_a_new_start_after_an_earlier_job(self, tmp_path: Path) -> None:
        """Each row has a partition of its own: what the new job writes again replaces the earlier job's row."""
        job = self._job(tmp_path)
        job.start()
        job.write(5)
        earlier = job.checkpoint(1)
        later = self._job(tmp_path)
        later.sink.check_new_start(later.context(0, epoch=2, job_id=2, attempt=""))
        later.start(None, epoch=2, job_id=2)
        later.write(3)
        later.checkpoint(2)
        assert self._rows(tmp_path) == earlier.visible
