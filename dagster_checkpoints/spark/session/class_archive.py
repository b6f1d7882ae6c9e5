"""An archive of the Java classes that Spark loads (class data sharing), which halves the processor time of Spark's start.

The archive is made once for each Java, Spark and class path, in the user's cache directory. A JVM that finds none records the
names of the classes that it loads; after some time, or when its process ends, `class_archive_maker` makes the archive from them,
in a process of the lowest priority. Java itself checks an archive that it is given: it ignores one that is damaged, or that does
not fit its version, its jars or its settings. So an archive changes nothing but the time of the start.

Java cannot archive classes behind a directory that holds files in the class path, such as `SPARK_CONF_DIR`.
This module must not know Dagster, nor import PySpark: it runs before the JVM is launched.

Source: https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from dagster_checkpoints.spark.session.java import cache_directory
from dagster_checkpoints.storage.processes import without_owner_mark

OPTIONS = "SPARK_SUBMIT_OPTS"
"""The environment variable whose options Spark's launcher puts in front of those that the user's Spark settings name."""
MAKE_AFTER_SECONDS = 60.0
"""Seconds from the start of the JVM until the archive is made: by then a pipeline has loaded the classes of its micro-batches."""
_FREE_MEMORY, _FREE_DISK = 2 * 1024**3, 1024**3
_CLASS_PATH_SETTINGS = ("SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_DIST_CLASSPATH")
_DAY = 24 * 3600.0
_STALE_SECONDS = {".jsa": 30 * _DAY, ".classes": 30 * _DAY, ".new": _DAY, ".list": _DAY}
_KEPT = 6
"""Archives, of some 200 MB each: each new environment makes one."""


class ClassArchive:
    """The archive for one Java, Spark and class path.

    Args:
        java_home: The Java home.
        settings: The settings of the Spark session.

    Attributes:
        path: The archive. An empty file means that none can be made.
    """

    def __init__(self, java_home: str, settings: Mapping[str, str]) -> None:
        self._java = Path(java_home) / "bin" / "java"
        self.path = cache_directory() / f"classes-{_identity(Path(java_home), settings)}.jsa"
        self._recording: Path | None = None
        self._making = threading.Lock()

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Let a JVM that is launched within this block use the archive; if there is none, let it record the classes it loads."""
        before = os.environ.get(OPTIONS)
        options = self._options()
        if not options:
            yield
            return
        os.environ[OPTIONS] = f"{options} {before}" if before else options  # of two equal options, Java takes the last
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(OPTIONS, None)
            else:
                os.environ[OPTIONS] = before

    def _options(self) -> str:
        if any(character.isspace() or character in "\"'\\" for character in str(self.path)):
            return ""  # blanks separate the options in the variable
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            if self.path.is_file():
                if not self.path.stat().st_size:
                    return ""
                with suppress(OSError):  # another user's archive, or one on a read-only disk
                    os.utime(self.path)
                return f"-XX:SharedArchiveFile={self.path} -XX:+VerifySharedSpaces"
            if not os.access(self.path.parent, os.W_OK):
                return ""
        except OSError:  # the start takes longer, nothing else
            return ""
        recording = self.path.with_name(f"{self.path.stem}-{uuid4().hex}.classes")
        self._recording = recording
        return f"-XX:DumpLoadedClassList={recording}"

    def make_later(self, class_path: str) -> None:
        """Make the archive from the recorded classes, in another process: after some time, or when this process ends.

        Does nothing if the JVM has the archive already, or was launched by other code.

        Args:
            class_path: The class path of the JVM.
        """
        if self._recording is None or not self._recording.is_file():
            return
        recording = self._recording

        def make() -> subprocess.Popen[bytes] | None:
            return self._start_maker(recording, class_path) if self._making.acquire(blocking=False) else None

        def make_after_a_while() -> None:
            time.sleep(MAKE_AFTER_SECONDS)
            if (maker := make()) is not None:
                maker.wait()

        atexit.register(make)
        threading.Thread(target=make_after_a_while, name="class-archive", daemon=True).start()

    def _start_maker(self, recording: Path, class_path: str) -> subprocess.Popen[bytes] | None:
        with suppress(OSError):
            if not _is_room(self.path.parent):
                recording.unlink(missing_ok=True)
                return None
            order = {"java": str(self._java), "archive": str(self.path), "classes": str(recording), "class_path": class_path}
            return subprocess.Popen(
                [sys.executable, "-m", "dagster_checkpoints.spark.session.class_archive_maker", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=without_owner_mark(),
                start_new_session=True,
            )
        return None

    def _remove_stale(self) -> None:
        """Remove all archives but the ones used last, what no run has used for a month, and what killed processes have left."""
        found: list[tuple[float, int, Path]] = []
        for file in self.path.parent.glob("classes-*"):
            with suppress(OSError):
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
        archives = [file for _, size, file in sorted(found, reverse=True) if file.suffix == ".jsa" and size]
        for modified, size, file in found:
            used = file == self.path and size
            stale = time.time() - modified > _STALE_SECONDS.get(file.suffix, float("inf"))
            if not used and (stale or file in archives[_KEPT:]):
                with suppress(OSError):
                    file.unlink()


def _identity(java_home: Path, settings: Mapping[str, str]) -> str:
    """A name for Java, Spark's jars and the class path."""
    texts = [str(java_home), settings.get("spark.driver.extraClassPath", "")]
    texts += [f"{name}={os.environ.get(name, '')}" for name in _CLASS_PATH_SETTINGS]
    with suppress(OSError):
        texts.append((java_home / "release").read_text(encoding="utf-8", errors="replace"))
    home = os.environ.get("SPARK_HOME")
    spec = None if home else importlib.util.find_spec("pyspark")
    if spec is not None and spec.submodule_search_locations:
        home = spec.submodule_search_locations[0]
    with suppress(OSError):
        for jar in sorted(Path(home or "", "jars").iterdir()):
            found = jar.stat()
            texts.append(f"{jar.name} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _is_room(folder: Path) -> bool:
    """Whether making an archive takes memory or disk from nothing else; a container counts by its own limit."""
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < _FREE_DISK:
        return False
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:") and int(line.split()[1]) * 1024 < _FREE_MEMORY:
            return False
    with suppress(OSError, ValueError):  # no such file, or `max`: no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        return limit - int(Path("/sys/fs/cgroup/memory.current").read_text()) >= _FREE_MEMORY
    return True
