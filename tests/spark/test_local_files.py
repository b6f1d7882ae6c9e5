"""Hadoop's local files as a session on one machine writes them: as Hadoop's own, without a process for each file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dagster_checkpoints.spark.session.hadoop import CLASSES, UNCHECKED, compiled, use_local_files

CHECKED = "fs.file.impl"
OURS = "dagster_checkpoints.LocalFiles$"


@pytest.fixture(scope="module")
def jvm(spark: SparkSession) -> Any:
    return spark._jvm


@pytest.fixture(scope="module")
def hadoop(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()


@pytest.fixture(scope="module", params=["Hadoop's own", "ours"])
def files(request: pytest.FixtureRequest, jvm: Any, hadoop: Any) -> Any:
    """Local files without checksums: Hadoop's class, and the one in its place."""
    if request.param == "ours":
        return jvm.org.apache.hadoop.fs.FileSystem.getLocal(hadoop).getRaw()
    own = jvm.org.apache.hadoop.fs.RawLocalFileSystem()
    own.initialize(jvm.java.net.URI("file:///"), hadoop)
    return own


def test_the_classes_are_those_of_the_source(jvm: Any) -> None:
    found = {str(file.relative_to(CLASSES)): file.read_bytes() for file in CLASSES.rglob("*.class")}
    made = compiled(jvm)
    assert found == made, f"LocalFiles.java was changed: write each of compiled(spark._jvm) to {CLASSES}"


def test_a_session_on_one_machine_takes_them(spark: SparkSession, jvm: Any, hadoop: Any) -> None:
    assert use_local_files(spark)
    assert (hadoop.get(UNCHECKED), hadoop.get(CHECKED)) == (f"{OURS}Unchecked", f"{OURS}Checked")
    uri = jvm.java.net.URI("file:///")
    assert jvm.org.apache.hadoop.fs.FileSystem.get(uri, hadoop).getClass().getName() == f"{OURS}Checked"
    assert jvm.org.apache.hadoop.fs.AbstractFileSystem.get(uri, hadoop).getClass().getName() == f"{OURS}Unchecked"


@pytest.mark.parametrize(("key", "value"), [(UNCHECKED, "org.apache.hadoop.fs.local.LocalFs"), (CHECKED, "some.other.Files")])
def test_classes_that_the_user_names_stay(spark: SparkSession, hadoop: Any, key: str, value: str) -> None:
    before = {each: hadoop.get(each) for each in (UNCHECKED, CHECKED)}
    try:
        hadoop.unset(CHECKED)
        hadoop.set(UNCHECKED, "org.apache.hadoop.fs.local.RawLocalFs")
        hadoop.set(key, value)
        assert not use_local_files(spark)
        assert hadoop.get(key) == value
    finally:
        for each, text in before.items():
            hadoop.set(each, text)


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o200, 0o100, 0o644, 0o640, 0o755, 0o777, 0o007, 0o1777])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_permissions_are_those_that_were_asked_for(files: Any, jvm: Any, tmp_path: Path, kind: str, mode: int) -> None:
    path = tmp_path / "a b"
    path.touch() if kind == "file" else path.mkdir()
    permission = jvm.org.apache.hadoop.fs.permission.FsPermission(f"{mode:04o}")
    files.setPermission(jvm.org.apache.hadoop.fs.Path(f"file:{path}"), permission)
    assert path.stat().st_mode & 0o7777 == mode


def test_permissions_of_a_file_that_is_not_there(files: Any, jvm: Any, tmp_path: Path) -> None:
    permission = jvm.org.apache.hadoop.fs.permission.FsPermission("0644")
    with pytest.raises(Exception, match=r"IOException|NoSuchFile|No such file"):
        files.setPermission(jvm.org.apache.hadoop.fs.Path(f"file:{tmp_path}/missing"), permission)


@pytest.mark.parametrize("scheme", ["file:", ""])
def test_what_a_path_leads_to(jvm: Any, hadoop: Any, tmp_path: Path, scheme: str) -> None:
    """A file, a folder, links to both, a link to nothing, and nothing: as Hadoop's class says it."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, target in {"to-file": "file", "to-folder": "folder", "to-nothing": "missing"}.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    own = jvm.org.apache.hadoop.fs.RawLocalFileSystem()
    own.initialize(jvm.java.net.URI("file:///"), hadoop)
    ours = jvm.org.apache.hadoop.fs.FileSystem.getLocal(hadoop).getRaw()

    def said(files: Any, name: str) -> str:
        try:
            found = files.getFileLinkStatus(jvm.org.apache.hadoop.fs.Path(f"{scheme}{tmp_path}/{name}"))
        except Exception as error:
            return str(getattr(error, "java_exception", error))
        link = str(found.getSymlink().toString()) if found.isSymlink() else "no link"
        return f"{found.getPath().toString()} {found.getLen()} {found.isDirectory()} {link}"

    for name in ("file", "folder", "to-file", "to-folder", "to-nothing", "missing"):
        assert said(ours, name) == said(own, name), name


@pytest.fixture
def processes_of_java(jvm: Any) -> Callable[[], int]:
    """What the processes that Java has started, and that have ended, have cost: page faults, of which each has some."""
    stat = Path(f"/proc/{jvm.java.lang.ProcessHandle.current().pid()}/stat")
    if not stat.exists():
        pytest.skip("needs /proc, which only Linux has")
    jvm.org.apache.spark.executor.ProcfsMetricsGetter.pTreeInfo().computeAllMetrics()  # Spark asks a shell once for its own id
    return lambda: int(stat.read_text().rpartition(")")[2].split()[8])


def test_no_process_is_started_for_files(
    spark: SparkSession, jvm: Any, tmp_path: Path, processes_of_java: Callable[[], int]
) -> None:
    """The files of a query and of its sink; Hadoop's own classes start 5 processes for each of the former, and 7 for a table."""
    spark.range(1).write.parquet(str(tmp_path / "warm"))
    folder = jvm.org.apache.hadoop.fs.Path(f"file:{tmp_path}/state")
    manager = jvm.org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager.create(
        folder, spark._jsparkSession.sessionState().newHadoopConf()
    )
    before = processes_of_java()
    manager.mkdirs(folder)
    stream = manager.createAtomic(jvm.org.apache.hadoop.fs.Path(folder, "1.changelog"), True)
    stream.write(bytearray(b"rows"))
    stream.close()
    spark.range(3).write.parquet(str(tmp_path / "rows"))
    assert processes_of_java() == before
    assert (tmp_path / "state/1.changelog").read_bytes() == b"rows"
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 3
