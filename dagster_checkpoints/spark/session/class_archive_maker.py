"""Makes an archive of Java classes: `python -m dagster_checkpoints.spark.session.class_archive_maker ORDER`.

Runs in a process of its own, which may be killed at any time: the archive appears by one rename, after Java has accepted it. If
Java cannot make one, an empty file says so. It must not know Spark.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

NEEDED_CLASS = "org/apache/spark/sql/execution/streaming/runtime/MicroBatchExecution"
"""A class without which the record is too short: its run ended before a stage read anything."""
_HEAP = "-Xmx512m"
_SECONDS = 1800.0
_OTHER_OPTIONS = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
"""Options for every Java, which may open ports or load agents."""


def make_archive(java: str, archive: Path, classes: Path, class_path: str, needed: str = NEEDED_CLASS) -> bool:
    """Make an archive; the record of classes is removed.

    Args:
        java: The program `java`.
        archive: The archive to make.
        classes: The record: a class in each line, as Java has written it. Its last line may be incomplete.
        class_path: The class path of the JVM that has recorded them.
        needed: A class that the record must contain.

    Returns:
        Whether the archive exists now. False if it cannot be made, or if another process is making it.
    """
    recorded = classes.read_text(encoding="utf-8", errors="replace")
    classes.unlink()
    lines = recorded[: recorded.rfind("\n") + 1]
    if not any(line.split(" ")[0] == needed for line in lines.splitlines()):
        return archive.is_file()
    with open(archive.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if archive.is_file():
            return archive.stat().st_size > 0
        new, complete = archive.with_suffix(".new"), archive.with_suffix(".list")
        try:
            complete.write_text(lines, encoding="utf-8")
            dump = ["-Xshare:dump", f"-XX:SharedClassListFile={complete}", f"-XX:SharedArchiveFile={new}", _HEAP]
            use = ["-Xshare:on", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={new}"]
            if not (_java(java, class_path, *dump) and _java(java, class_path, *use, "-version")):
                new.unlink(missing_ok=True)
                new.touch()
            new.rename(archive)
        finally:
            complete.unlink(missing_ok=True)
            new.unlink(missing_ok=True)
    return archive.stat().st_size > 0


def _java(java: str, class_path: str, *options: str) -> bool:
    environment = {name: value for name, value in os.environ.items() if name not in _OTHER_OPTIONS}
    command = [java, "-cp", class_path, "-Xlog:disable", *options]
    with suppress(subprocess.TimeoutExpired):
        return not subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_SECONDS,
            check=False,
        ).returncode
    return False


if __name__ == "__main__":
    os.nice(19)
    order = json.loads(sys.argv[1])
    make_archive(order["java"], Path(order["archive"]), Path(order["classes"]), order["class_path"])
