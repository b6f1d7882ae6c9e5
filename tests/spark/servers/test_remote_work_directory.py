"""A work directory that only Spark's Hadoop client reaches: HDFS, with real servers on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, Quarantine, StageInput, stage, unbounded_source
from dagster_checkpoints.spark.files.hadoop_path import HadoopPath
from dagster_checkpoints.spark.files.work_path import entries_of, local_copies, place, remove_tree, rename, rows_of, size_of, url
from dagster_checkpoints.spark.job.events import CheckpointDone, JobRestarting, JobStarted
from dagster_checkpoints.spark.session.java import find_java_home
from dagster_checkpoints.spark.session.work_directory import RemoteDirectory, WorkDirectoryError
from resources.embedded_s3 import EmbeddedS3
from tests.spark.processes import conftest as processes
from tests.spark.processes import crash_runner, killed_runs
from tests.spark.servers import hdfs as servers
from tests.spark.servers import jars

DEADLINE = 150.0


start = processes.start  # the fixture


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    java = f"{find_java_home()}/bin/java"
    with servers.running_hdfs(tmp_path_factory.mktemp("hdfs"), java, jars.fetched(jars.HDFS, java)) as running:
        yield running


def set_space_quota(folder: HadoopPath, size: int) -> None:
    """Limit the bytes below a directory; -1 lifts the limit."""
    unlimited = 2**63 - 1  # of names
    folder._system.client.setQuota(folder._path, unlimited, size)


def test_files_on_hdfs(spark: SparkSession, hdfs: Any, tmp_path: Path) -> None:
    root = RemoteDirectory(f"{hdfs.url}/a folder/ü").open(spark)
    assert str(root) == url(root) == f"{hdfs.url}/a folder/ü"
    assert root.name == "ü" and str(root.parent) == f"{hdfs.url}/a folder"
    assert not root.exists() and entries_of(root) == [] and root.files_below() == []
    root.mkdir(parents=True)
    assert root.exists()
    text = root / "text"
    for words in ("first", "second ü"):
        text.write_text(words, "utf-8")
        assert text.read_text("utf-8") == words
    assert size_of(text) == len("second ü".encode())
    assert entries_of(root) == [text]
    for missing in (lambda: (root / "none").read_text("utf-8"), lambda: (root / "none").unlink()):
        with pytest.raises(FileNotFoundError, match="none"):
            missing()
    (root / "none").unlink(missing_ok=True)

    spark.range(0, 30, 1, 3).write.parquet(url(root / "table"))
    assert set(entries_of(root)) == {text, root / "table"}
    files = [file.path for file in (root / "table").files_below() if file.path.name.endswith(".parquet")]
    assert sorted(rows_of(file) for file in files) == [10, 10, 10]
    with local_copies(files, tmp_path / "copies") as copies:
        assert sum(rows_of(copy) for copy in copies) == 30 and {copy.parent for copy in copies} == {tmp_path / "copies"}
    assert not (tmp_path / "copies").exists()

    for part in ("one", "two"):
        (tmp_path / "up" / part).mkdir(parents=True)
        (tmp_path / "up" / part / "file").write_text(part)
        place(tmp_path / "up", root / "placed")
        assert not (tmp_path / "up").exists()
    assert {str(status.path): status.size for status in (root / "placed").files_below()} == {
        f"{root}/placed/{part}/file": 3 for part in ("one", "two")
    }
    rename(root / "placed" / "one", root / "moved")
    assert (root / "moved" / "file").read_text("utf-8") == "one" and not (root / "placed" / "one").exists()
    with pytest.raises(FileNotFoundError, match="none"):
        rename(root / "none", root / "other")
    remove_tree(root)
    assert not root.exists()


def test_a_url_that_hadoop_cannot_use_is_refused_by_name(spark: SparkSession) -> None:
    with pytest.raises(WorkDirectoryError, match=r"s3a://bucket/work to be on .*hadoop-aws of Spark's Hadoop version"):
        RemoteDirectory("s3a://bucket/work").open(spark)
    with pytest.raises(WorkDirectoryError, match="nothing://host/work"):
        RemoteDirectory("nothing://host/work").open(spark)


def test_a_server_that_is_not_there_is_named_before_anything_starts(lab: Any) -> None:
    @unbounded_source(sink=lab.sink())
    def live(context):
        return lab.stream("live", "v long")

    job = lab.start(Pipeline("nowhere", [live]), work_directory=RemoteDirectory("hdfs://127.0.0.1:1/work"))
    failed = job.result()
    assert failed.status == "FAILED" and isinstance(failed.error, WorkDirectoryError | OSError)
    assert "hdfs://127.0.0.1:1/work" in str(failed.error) and "Connection refused" in str(failed.error)
    assert not job.of(JobStarted)


def test_a_pipeline_on_hdfs_is_exact_through_suspend_restart_and_drain(lab: Any, hdfs: Any) -> None:
    """A fan-in with a static input, windows, two sinks; a savepoint moves from HDFS to a local directory and back.

    On the way back the windows get a second instance.
    """
    feed = killed_runs.Feed(lab)
    feed.more()
    pipeline = crash_runner.pipeline(lab.folder, str(lab.folder / "input"))
    elsewhere = {"work_directory": RemoteDirectory(f"{hdfs.url}/work"), "scratch_directory": lab.folder / "scratch"}

    first = lab.start(pipeline, **elsewhere)
    done = first.wait_for(CheckpointDone, lambda done: done.stages["named"].rows > 0)
    assert done.total_bytes > 0
    assert not (lab.folder / "work").exists(), "nothing of the records is on this machine"
    lab.control("crashing").stop(drain=False).wait(DEADLINE)
    first.finished()

    feed.more()
    second = lab.start(pipeline)
    assert second.wait_for(JobStarted).restored_checkpoint is not None
    second.wait_until(lambda: second.execution.rows().get("named", 0) > 100)
    lab.control("crashing").stop(drain=False).wait(DEADLINE)
    second.finished()

    feed.more()
    wider = crash_runner.pipeline(lab.folder, str(lab.folder / "input"), hours_instances=2)
    third = lab.start(wider, restart=FixedDelayRestart(2, 0.1), **elsewhere)
    third.wait_for(CheckpointDone)
    work = RemoteDirectory(f"{hdfs.url}/work/crashing").open(lab.spark)
    [attempt] = entries_of(work)
    remove_tree(attempt)  # as a clean-up by mistake would
    feed.more()
    third.wait_for(JobRestarting)
    third.wait_until(lambda: third.execution.rows().get("named") == feed.live_rows + feed.history_rows)
    third.drain()
    third.finished()
    feed.check()
    left = [str(file.path) for file in work.files_below()]
    # Spark's maintenance may store state after the query's end; the next run deletes it.
    assert not [file for file in left if "/state/" not in file], "nothing is left behind"
    assert not list((lab.folder / "scratch").rglob("*"))


def test_refused_rows_on_hdfs(lab: Any, hdfs: Any) -> None:
    """Each row in one of two tables, once, through a cancelled run, the loss of the attempt's directory, and a drain."""
    rows = "k string, v long"
    bits: dict[str, Any] = {f"bit_{bit}": f"v >> {bit} & 1 = 0" for bit in range(3)}
    by_chance: dict[str, Any] = {"is_lucky": lambda rows: F.rand() < 0.5}

    @unbounded_source
    def live(context):
        return lab.stream("live", rows)

    @stage(
        inputs={"live": StageInput(edge="all_to_all")},
        instances=["x", "y"],
        sink=lab.sink("passed"),
        quarantine=Quarantine(bits | by_chance, sink=lab.sink("refused")),
    )
    def passed(live):
        return live

    @stage(sink=lab.sink("seen"))
    def seen(passed):
        return passed

    def put(first: int) -> None:
        for start in range(first, first + 120, 40):
            lab.put("live", rows, [("ab"[v % 2], v) for v in range(start, start + 40)])

    pipeline = Pipeline("refusing", [live, passed, seen])
    elsewhere = {
        "work_directory": RemoteDirectory(f"{hdfs.url}/a work/ü"),
        "scratch_directory": lab.folder / "scratch",
        "restart": FixedDelayRestart(3, 0.1),
    }
    put(0)
    job = lab.start(pipeline, **elsewhere)
    job.wait_until(lambda: lab.count("refused") > 0)
    job.cancel()
    job.result()

    put(120)
    job = lab.start(pipeline, **elsewhere)
    job.wait_for(CheckpointDone)
    work = RemoteDirectory(f"{hdfs.url}/a work/ü/refusing").open(lab.spark)
    for attempt in entries_of(work):
        remove_tree(attempt)  # as a clean-up by mistake would
    put(240)
    job.wait_for(JobRestarting)
    job.wait_until(lambda: job.execution.rows().get("live") == 360)
    job.drain()
    job.finished()
    refused = lab.committed("refused")
    found = lab.committed("passed") + [row[:2] for row in refused]
    assert sorted(found) == sorted(lab.rows(lab.table("live", rows)))
    assert lab.committed("seen") == lab.committed("passed") and {row[1] % 8 for row in lab.committed("passed")} == {0}
    for _, v, reasons, checkpoint in refused:
        assert (
            reasons.removesuffix(", is_lucky") == ", ".join(name for bit, name in enumerate(bits) if v >> bit & 1) or v % 8 == 0
        )
        assert checkpoint is not None
    assert {row[2] for row in refused if row[1] % 8 == 0} == {"is_lucky"}
    left = [str(file.path) for file in work.files_below()]
    assert not [file for file in left if "/state/" not in file], "nothing is left behind"


def test_a_name_node_that_is_away_and_a_full_directory_delay_and_lose_nothing(lab: Any, hdfs: Any) -> None:
    work = RemoteDirectory(f"{hdfs.url}/patient").open(lab.spark)
    work.mkdir()
    lab.put("live", "v long", [(0,)])

    @unbounded_source
    def live(context):
        return lab.stream("live", "v long")

    @stage(sink=lab.sink())
    def passed(live):
        return live

    job = lab.start(
        Pipeline("patient", [live, passed], chaining=False),
        restart=FixedDelayRestart(20, 1.0),
        work_directory=RemoteDirectory(f"{hdfs.url}/patient"),
        scratch_directory=lab.folder / "scratch",
    )
    job.wait_for(CheckpointDone)
    with hdfs.away():
        lab.put("live", "v long", [(n,) for n in range(1, 50)])
        time.sleep(8)
    job.wait_until(lambda: job.execution.rows().get("passed") == 50)
    restarts = len(job.of(JobRestarting))

    set_space_quota(work, 1)  # less than one block of HDFS: nothing can be written
    lab.put("live", "v long", [(n,) for n in range(50, 60)])
    job.wait_until(lambda: len(job.of(JobRestarting)) > restarts)
    assert "The DiskSpace quota of /patient is exceeded" in job.of(JobRestarting)[restarts].cause
    set_space_quota(work, -1)
    job.wait_until(lambda: job.execution.rows().get("passed") == 60)
    job.drain()
    job.finished()
    lab.check(lab.table("live", "v long"))


def copies(child: Any) -> list[str]:
    """The keys that the server has written by a copy, without those of the check at the start."""
    keys = [str(event["key"]) for event in child.events("CopiedByServer")]
    return [key for key in keys if not key.startswith(".probe-") and not key.endswith("-proof/back")]


def test_a_pipeline_on_s3a_is_exact_after_a_kill(lab: Any, start: Any) -> None:
    """Input, work directory and checkpoints on one S3 server, which copies files of state and records in flight both ways.

    In processes of their own: a session gets its jars at its start. The second one knows the hashes of what it writes.
    """
    java = f"{find_java_home()}/bin/java"
    needed = jars.fetched(jars.S3A, java)
    feed = killed_runs.Feed(lab, history_files=6)  # each micro-batch takes seconds here
    feed.more()
    with EmbeddedS3() as s3, pytest.MonkeyPatch.context() as environment:
        for name, value in s3.environment.items():
            environment.setenv(name, value)
        spark = {
            "spark.master": "local[2]",
            "spark.jars": ",".join(map(str, needed)),
            "spark.hadoop.fs.s3a.endpoint": s3.endpoint_url,
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.path.style.access": True,
            "spark.hadoop.fs.s3a.connection.ssl.enabled": False,
            "spark.hadoop.fs.s3a.access.key": s3.credentials["aws_access_key_id"],
            "spark.hadoop.fs.s3a.secret.key": s3.credentials["aws_secret_access_key"],
        }
        work, store = f"s3a://{s3.bucket}/work", f"{s3.url}/store"
        read = f"s3a://{s3.bucket}/input"
        settings = {"work": work, "storage": store, "input": read, "interval": 3.0, "smallest_server_copy": 0}
        for file in sorted((lab.folder / "input").rglob("*.parquet"), key=lambda file: file.name):
            s3.client().upload_file(str(file), s3.bucket, file.relative_to(lab.folder).as_posix())
        child = start("first", spark=spark, **settings)
        child.wait_for("CheckpointDone", lambda done: done["stages"]["named"]["rows"] > 0)
        child.kill()
        copied = {key.rpartition("/")[0] for key in copies(child)}
        assert copied == {"crashing/shared"}, "every file of state is copied by the server: only logs are sent"
        feed.drain_when_consumed()
        child = start("last", spark={**spark, "spark.hadoop.fs.s3a.create.checksum.algorithm": "SHA256"}, **settings)
        assert child.end()["status"] == "FINISHED", child.story()
        restored = [key for key in copies(child) if key.startswith("work/")]
        assert any(key.endswith((".changelog", ".zip")) for key in restored), child.story()
        assert not [key for key in restored if "/offsets/" in key or "/commits/" in key], "a restore may change these"
        assert child.events("JobStarted")[0]["restored_checkpoint"] is not None
        feed.check()
        left = [found["Key"] for found in s3.client().list_objects_v2(Bucket=s3.bucket, Prefix="work/").get("Contents", [])]
        # Spark's maintenance may store state after the query's end; the next run deletes it.
        assert not [key for key in left if not key.endswith("/") and "/state/" not in key], "nothing is left behind"
