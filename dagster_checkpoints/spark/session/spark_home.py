"""A Spark home whose Python workers start in a third of the time.

Spark puts `$SPARK_HOME/python/lib/pyspark.zip` in front of its workers' module path, and Python compiles modules from an
archive again in every process: half a second of processor time each, and every streaming source is a process. With a
home without the archive, the workers import the installed package, which is the same code and already compiled.

This module must not know Dagster, nor import PySpark: it runs before the JVM is launched.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import site
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dagster_checkpoints.spark.session.java import cache_directory

_LEFT_OUT = "python"  # the directory with the archive


@contextmanager
def lean_spark_home(settings: Mapping[str, str]) -> Iterator[None]:
    """Set `SPARK_HOME` for a JVM that is launched within this block: its Python workers then import the installed PySpark.

    Does nothing if the workers' PySpark might be another one or missing: on a cluster, with a Spark home or a worker's Python
    that the user chose, with a PySpark that is not among this Python's packages. Restores `SPARK_HOME` at the end.

    Args:
        settings: The session's Spark settings.
    """
    package = _installed_package()
    if package is None or "SPARK_HOME" in os.environ or not _workers_use_this_python(settings):
        yield
        return
    try:
        os.environ["SPARK_HOME"] = str(_home_of(package))
    except OSError:  # the workers start more slowly, nothing else
        yield
        return
    try:
        yield
    finally:
        os.environ.pop("SPARK_HOME", None)


def _installed_package() -> Path | None:
    """The directory in which PySpark is installed with its jars; None if another process of this Python may not find it."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    site_packages = {Path(folder).resolve() for folder in site.getsitepackages()}
    complete = (package / "bin" / "spark-submit").is_file() and (package / "jars").is_dir()
    return package if complete and package.parent.resolve() in site_packages else None


def _workers_use_this_python(settings: Mapping[str, str]) -> bool:
    chosen = settings.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or sys.executable
    worker = shutil.which(chosen)
    if worker is None or not settings.get("spark.master", "").startswith("local"):
        return False
    # python and python3.11 of one virtual environment; a link in another directory has other packages.
    this = Path(sys.executable)
    return Path(worker).parent == this.parent and os.path.samefile(worker, this)


def _home_of(package: Path) -> Path:
    """A Spark home with links to everything in the package except the archive.

    It is stored in the user's cache directory. Its name depends on the linked files, so its content never changes; one rename
    creates it as a whole.
    """
    entries = sorted(entry for entry in package.iterdir() if entry.name != _LEFT_OUT)
    name = hashlib.sha256("\n".join(map(str, entries)).encode()).hexdigest()[:16]
    home = cache_directory() / f"spark-{name}"
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
    try:
        for entry in entries:
            (building / entry.name).symlink_to(entry)
        try:
            building.rename(home)
        except OSError:
            if not home.is_dir():  # otherwise another process has created it in this moment, with the same content
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return home
