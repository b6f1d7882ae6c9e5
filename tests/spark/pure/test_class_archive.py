"""The archive of Java classes: made once, ignored if it is damaged or foreign, and never in the way of a user's own options."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest

from dagster_checkpoints.spark.session import class_archive
from dagster_checkpoints.spark.session.class_archive import OPTIONS, ClassArchive
from dagster_checkpoints.spark.session.class_archive_maker import NEEDED_CLASS, make_archive
from dagster_checkpoints.spark.session.java import find_java_home
from dagster_checkpoints.storage.processes import mark_descendants, this_process

LOCAL = {"spark.master": "local[2]"}
CLASS = "java/util/concurrent/ForkJoinPool"
USES = "-Xlog:class+load:stdout"


@pytest.fixture(scope="module")
def java() -> str:
    return str(Path(find_java_home()) / "bin" / "java")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(OPTIONS, raising=False)
    return tmp_path / "dagster-checkpoints"


def recorded(folder: Path, *classes: str) -> Path:
    file = folder / "recorded.classes"
    file.write_text("".join(f"{name} id: {number}\n" for number, name in enumerate(classes)))
    return file


def from_the_archive(java: str, archive: Path) -> bool:
    """Whether a JVM that is given the archive starts, and takes its classes from it."""
    options = ["-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={archive}", USES, "-cp", "/no/such.jar", "-version"]
    found = subprocess.run([java, *options], capture_output=True, text=True, check=True)
    assert "version" in found.stderr
    return "source: shared objects file" in found.stdout


def test_an_archive_is_made_from_a_record_and_is_ignored_when_damaged_or_foreign(java: str, tmp_path: Path) -> None:
    archive = tmp_path / "classes.jsa"
    names = ["java/lang/Object", "java/lang/String", CLASS]
    incomplete = recorded(tmp_path, *names)
    incomplete.write_text(incomplete.read_text() + "java/util/Tree")  # Java is writing this line
    assert make_archive(java, archive, incomplete, "/no/such.jar", CLASS)
    assert not incomplete.exists()
    assert from_the_archive(java, archive)
    before = archive.stat()
    assert make_archive(java, archive, recorded(tmp_path, *names), "/no/such.jar", CLASS), "another run has made it"
    assert archive.stat() == before
    damaged = tmp_path / "damaged.jsa"
    data = bytearray(archive.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4096] = bytes(255 - byte for byte in data[len(data) // 2 : len(data) // 2 + 4096])
    for content in (bytes(data), bytes(data[: len(data) // 3]), b"", b"from another Java"):
        damaged.write_bytes(content)
        assert not from_the_archive(java, damaged)


def test_what_cannot_be_archived_is_not_tried_again(java: str, tmp_path: Path) -> None:
    archive, folder = tmp_path / "classes.jsa", tmp_path / "configuration"
    folder.mkdir()
    (folder / "spark-defaults.conf").touch()
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("scala-library*.jar")
    assert not make_archive(java, archive, recorded(tmp_path, "scala/Option"), f"{folder}:{jar}", "scala/Option")
    assert archive.stat().st_size == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["classes.jsa", "classes.lock", "configuration"]


def test_a_record_of_a_run_without_a_batch_makes_no_archive(java: str, tmp_path: Path) -> None:
    assert not make_archive(java, tmp_path / "classes.jsa", recorded(tmp_path, CLASS), "", NEEDED_CLASS)
    assert not list(tmp_path.iterdir())


def test_only_one_process_makes_an_archive(tmp_path: Path) -> None:
    with (tmp_path / "classes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not make_archive("/no/such/java", tmp_path / "classes.jsa", recorded(tmp_path, CLASS), "", CLASS)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["classes.lock"]


def offered() -> str | None:
    before = os.environ.get(OPTIONS)
    with ClassArchive(find_java_home(), LOCAL).offered():
        options = os.environ.get(OPTIONS)
    assert os.environ.get(OPTIONS) == before
    return options


def test_a_jvm_records_its_classes_or_uses_the_archive_and_keeps_the_users_options(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = offered()
    assert options is not None and options.startswith(f"-XX:DumpLoadedClassList={cache}/classes-")
    archive = ClassArchive(find_java_home(), LOCAL).path
    archive.write_bytes(b"made")
    monkeypatch.setenv(OPTIONS, "-Dmine=1 -XX:SharedArchiveFile=/my/own.jsa")
    assert offered() == f"-XX:SharedArchiveFile={archive} -XX:+VerifySharedSpaces -Dmine=1 -XX:SharedArchiveFile=/my/own.jsa"
    archive.write_bytes(b"")  # none can be made
    assert offered() == "-Dmine=1 -XX:SharedArchiveFile=/my/own.jsa"


@pytest.mark.parametrize("place", ["file", "a folder"])
def test_a_cache_that_cannot_be_used_only_costs_time(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
    assert offered() is None


def test_another_java_spark_or_class_path_has_another_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "jdk"
    home.mkdir()
    (home / "release").write_text('JAVA_VERSION="17.0.1"')
    jars = tmp_path / "spark" / "jars"
    jars.mkdir(parents=True)
    paths = [ClassArchive(str(home), LOCAL).path]
    paths.append(ClassArchive(str(home), {**LOCAL, "spark.driver.extraClassPath": "/my.jar"}).path)
    monkeypatch.setenv("SPARK_HOME", str(jars.parent))
    paths.append(ClassArchive(str(home), LOCAL).path)
    (jars / "spark-sql.jar").write_text("4.3.0")
    paths.append(ClassArchive(str(home), LOCAL).path)
    (home / "release").write_text('JAVA_VERSION="17.0.2"')
    paths.append(ClassArchive(str(home), LOCAL).path)
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    paths.append(ClassArchive(str(home), LOCAL).path)
    assert len(set(paths)) == len(paths)


def test_unused_archives_and_records_are_removed_after_a_month(cache: Path) -> None:
    cache.mkdir()
    own = ClassArchive(find_java_home(), LOCAL).path
    old, new = cache / "classes-old.jsa", cache / "classes-new.jsa"
    record, other = cache / "classes-old-1.classes", cache / "java-home"
    for file in (own, old, new, record, other):
        file.write_text("content")
    for file in (own, old, record, other):
        os.utime(file, (0, 0))
    assert "SharedArchiveFile" in str(offered()), "a job that runs each quarter keeps its archive"
    assert {file.name for file in cache.iterdir()} == {own.name, "classes-new.jsa", "java-home"}
    own.write_text("")  # once in a while it is tried again
    os.utime(own, (0, 0))
    assert "DumpLoadedClassList" in str(offered()) and not own.exists()


def test_only_the_archives_used_last_are_kept_and_what_killed_makers_left_goes_after_a_day(cache: Path) -> None:
    cache.mkdir()
    own = ClassArchive(find_java_home(), LOCAL).path
    own.write_text("content")
    os.utime(own, (time.time() - 1000,) * 2)
    for number in range(9):  # a new environment each hour
        made = cache / f"classes-{number}.jsa"
        made.write_text("content")
        os.utime(made, (time.time() - 100 * number,) * 2)
    impossible = cache / "classes-none.jsa"
    impossible.touch()
    for name, age in (("killed.new", 90_000), ("killed.list", 90_000), ("running.new", 3000), ("killed.lock", 90_000)):
        (cache / f"classes-{name}").touch()
        os.utime(cache / f"classes-{name}", (time.time() - age,) * 2)
    offered()
    kept = {f"classes-{number}.jsa" for number in range(6)}
    assert {file.name for file in cache.iterdir()} == kept | {
        own.name,
        impossible.name,
        "classes-running.new",
        "classes-killed.lock",
    }


def test_an_archive_of_another_user_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    archive = ClassArchive(find_java_home(), LOCAL).path
    cache.mkdir()
    archive.write_text("made")
    monkeypatch.setattr(os, "utime", refused)
    assert str(archive) in str(offered())


def test_sparks_launcher_puts_the_archive_in_front_of_the_users_java_options(java: str, cache: Path) -> None:
    archive = ClassArchive(find_java_home(), LOCAL)
    cache.mkdir()
    archive.path.write_text("made")
    spark_home = Path(pyspark.__file__).parent
    command = [java, "-cp", f"{spark_home}/jars/*", "org.apache.spark.launcher.Main", "org.apache.spark.deploy.SparkSubmit"]
    command += ["--conf", "spark.driver.extraJavaOptions=-Dmine=1 -XX:SharedArchiveFile=/my/own.jsa", "pyspark-shell"]
    with archive.offered():
        environment = {**os.environ, "SPARK_HOME": str(spark_home), "SPARK_SCALA_VERSION": "2.13"}  # as bin/spark-class
        launched = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split("\0")
    options = [option for option in launched if option == "-Dmine=1" or option.startswith("-XX:SharedArchiveFile")]
    assert options == [f"-XX:SharedArchiveFile={archive.path}", "-Dmine=1", "-XX:SharedArchiveFile=/my/own.jsa"]


@pytest.fixture
def fake_java(tmp_path: Path) -> Path:
    """A Java home whose `java` notes that it makes an archive, and its environment."""
    program = tmp_path / "jdk" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        "for option; do case $option in -XX:SharedArchiveFile=*) file=${option#*=} ;; -Xshare:dump) dumps=yes ;; esac; done\n"
        f'if [ "$dumps" ]; then echo made > "$file"; env > "{tmp_path}/environment"; echo "$@" >> "{tmp_path}/commands"; fi\n'
    )
    program.chmod(0o755)
    return tmp_path / "jdk"


def begin(java_home: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ClassArchive, Path, Callable[[], object]]:
    """A JVM that has recorded its classes, with the function that makes the archive when this process ends."""
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(class_archive.atexit, "register", at_exit.append)
    archive = ClassArchive(str(java_home), LOCAL)
    with archive.offered():
        record = Path(os.environ[OPTIONS].partition("=")[2])
        archive.make_later("/jars/*")
        assert not at_exit, "no JVM has recorded anything"
        record.write_text(content)
    archive.make_later("/jars/*")
    return archive, record, at_exit[0]


def test_the_archive_is_made_once_by_a_process_that_is_no_descendant_of_the_pipelines_owner(
    fake_java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(class_archive, "MAKE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(class_archive, "_FREE_MEMORY", 0)
    monkeypatch.setattr(class_archive, "_FREE_DISK", 0)
    monkeypatch.setenv("DAGSTER_CHECKPOINTS_OWNER", "before")
    mark_descendants(this_process("run"))
    archive, record, at_exit = begin(fake_java, f"java/lang/Object id: 1\n{NEEDED_CLASS} id: 2\njava/la", monkeypatch)
    until = time.monotonic() + 240.0
    while not archive.path.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert at_exit() is None
    assert archive.path.read_text() == "made\n" and not record.exists()
    (command,) = (tmp_path / "commands").read_text().splitlines()
    assert command.startswith("-cp /jars/* ")
    environment = (tmp_path / "environment").read_text()
    assert "XDG_CACHE_HOME=" in environment and "DAGSTER_CHECKPOINTS_OWNER" not in environment


def test_no_archive_is_made_where_memory_or_disk_is_short(fake_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "_FREE_DISK", 2**62)
    monkeypatch.setattr(class_archive, "MAKE_AFTER_SECONDS", 3600.0)
    monkeypatch.setattr(class_archive.threading.Thread, "start", lambda thread: None)
    _, record, at_exit = begin(fake_java, f"{NEEDED_CLASS}\n", monkeypatch)
    assert at_exit() is None
    assert not record.exists()
