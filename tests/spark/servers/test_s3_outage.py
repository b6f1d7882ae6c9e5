"""A whole run whose checkpoints are in S3, on a server that fails for a while."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.errors import StorageUnavailable
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.errors import JobFailedError
from dagster_checkpoints.spark.job.events import CheckpointNotDone, JobStarted
from dagster_checkpoints.storage import CheckpointStorage, open_store
from resources.embedded_s3 import EmbeddedS3
from tests.spark.test_recovery_failures import ROWS, check_history, in_hours, live_hours


def test_a_whole_run_on_s3_survives_an_outage_and_fails_when_it_lasts(lab: Any) -> None:
    pipeline = Pipeline("cloud", live_hours(lab), chaining=False)
    number = 0

    def more() -> None:
        nonlocal number
        lab.put("live", ROWS, [("a", lab.at(60 * m), m) for m in range(number * 40, number * 40 + 40)])
        number += 1

    def wait_for_rows(job: Any) -> None:
        job.wait_until(lambda: job.execution.rows().get("live", 0) == 40 * number)

    with EmbeddedS3() as s3:

        def storage() -> CheckpointStorage:
            return CheckpointStorage(open_store(f"{s3.url}/root", client=s3.client(max_pool_connections=20)), "cloud")

        more()
        job = lab.start(pipeline, storage=storage(), interval=0.5, checkpoints={"tolerable_failed_checkpoints": 1000})
        job.wait_until(lambda: len(job.checkpoints()) >= 1)
        with s3.fault("answer", method="PUT", key="/shared/"):
            more()
            job.wait_until(lambda: len(job.of(CheckpointNotDone)) >= 2)
            more()
            wait_for_rows(job)  # the pipeline continues during the failures
        failed = job.of(CheckpointNotDone)
        assert {event.reason for event in failed} == {"IO_EXCEPTION"}
        assert "SlowDown" in failed[0].message or "503" in failed[0].message
        after = len(job.checkpoints())
        job.wait_until(lambda: len(job.checkpoints()) > after)
        job.cancel()
        assert job.result().status == "CANCELED"
        check_history(job, storage(), "CANCELED")

        more()
        strict = lab.start(pipeline, storage=storage(), interval=0.5, checkpoints={"tolerable_failed_checkpoints": 1})
        done = strict.wait_for(JobStarted).restored_checkpoint
        assert done >= job.checkpoints()[-1].checkpoint_id
        wait_for_rows(strict)
        with s3.fault("answer", method="PUT", key="/shared/"):
            more()
            ended = strict.result()
        assert ended.status == "FAILED"
        assert isinstance(ended.error, JobFailedError) and "tolerable_failed_checkpoints" in str(ended.error)
        assert len(strict.of(CheckpointNotDone)) == 2
        check_history(strict, storage(), "FAILED")

        with s3.outage():
            unreachable = lab.start(pipeline, storage=storage())
            unreachable.execution._session = lambda: pytest.fail("Spark is started although storage is away")
            with pytest.raises(StorageUnavailable, match=s3.bucket):
                unreachable.result()

        last = lab.start(pipeline, storage=storage(), interval=0.5)
        wait_for_rows(last)
        last.drain()
        last.finished()
        check_history(last, storage(), "FINISHED", "drain")
        lab.check(in_hours(lab.table("live", ROWS)), "hours")
        keys = [one["Key"] for one in s3.client().list_objects_v2(Bucket=s3.bucket).get("Contents", [])]
        *kept, report, state, status = keys
        assert [state, status] == ["root/cloud/state.json", "root/cloud/status.json"]
        assert report == "root/cloud/report.html"
        assert {key.rpartition("/")[0] for key in kept} == {"root/cloud/history"}, "a finished job leaves no checkpoint"
