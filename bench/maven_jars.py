"""Jars that only tests and measurements need, from Maven Central: Ivy, which PySpark brings along, fetches them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class JarsUnavailable(Exception):
    """A jar cannot be fetched."""


@dataclass(frozen=True)
class Jar:
    """A jar of Maven Central, pinned by the hash of its bytes."""

    organisation: str
    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.name}-{self.version}.jar"


def pinned(file: Path) -> tuple[Jar, ...]:
    """The jars in a list, one per line: `organisation:name:version sha256`."""
    jars = []
    for line in file.read_text().splitlines():
        coordinates, sha256 = line.split()
        organisation, name, version = coordinates.split(":")
        jars.append(Jar(organisation, name, version, sha256))
    return tuple(jars)


def fetched(jars: Sequence[Jar], java: str) -> list[Path]:
    """The jars in a cache of the user's.

    Raises:
        JarsUnavailable: One of them cannot be fetched.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dagster-checkpoints-tests"
    missing = [jar for jar in jars if not (cache / jar.file).exists()]
    if missing:
        _fetch(missing, cache, java)
    return [cache / jar.file for jar in jars]


def _fetch(jars: Sequence[Jar], cache: Path, java: str) -> None:
    import pyspark

    [ivy] = (Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar")
    with tempfile.TemporaryDirectory(prefix="jars-") as folder:
        wanted = "".join(
            f'<dependency org="{j.organisation}" name="{j.name}" rev="{j.version}" transitive="false"/>' for j in jars
        )
        module = '<info organisation="tests" module="tests"/><configurations><conf name="default"/></configurations>'
        defaults = '<dependencies defaultconfmapping="default->default,master">'
        Path(folder, "ivy.xml").write_text(f'<ivy-module version="2.0">{module}{defaults}{wanted}</dependencies></ivy-module>')
        retrieved = f"{folder}/[artifact]-[revision].[ext]"
        command = [java, "-cp", str(ivy), "org.apache.ivy.Main", "-cache", f"{folder}/ivy", "-ivy", f"{folder}/ivy.xml"]
        ran = subprocess.run(
            [*command, "-retrieve", retrieved, "-types", "jar", "bundle"], capture_output=True, text=True, timeout=900
        )
        for jar in jars:
            file = Path(folder, jar.file)
            if not file.exists():
                problem = f"{ran.stdout[-500:]}{ran.stderr[-500:]}"
                raise JarsUnavailable(f"needs {jar.organisation}:{jar.name}:{jar.version} from Maven Central: {problem}")
            found = hashlib.sha256(file.read_bytes()).hexdigest()
            assert found == jar.sha256, f"expected {jar.file} with sha256 {jar.sha256}, found {found}"
            cache.mkdir(parents=True, exist_ok=True)
            scratch = cache / f".{jar.file}.{os.getpid()}"
            scratch.write_bytes(file.read_bytes())
            scratch.rename(cache / jar.file)
