"""The suite that every sink has to pass, for settings with which rows of other checkpoints are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from dagster_checkpoints.sinks import SinkCannotTakeBack
from dagster_checkpoints.testing import SinkConformance


class ReplacesByKey(SinkConformance):
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


class ReplacesPartitions(SinkConformance):
    new_start = "keep"
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
