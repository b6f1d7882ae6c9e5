"""Jars that only tests need; a test is skipped where they cannot be fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import maven_jars
from bench.maven_jars import Jar, JarsUnavailable, pinned

HDFS = pinned(Path(__file__).with_name("hdfs-jars.txt"))
"""NameNode and DataNode, of the Hadoop version whose client Spark brings along."""
S3A = pinned(Path(__file__).with_name("s3a-jars.txt"))
"""Hadoop's file system for S3 of the same version, and the parts of Amazon's SDK that it uses; Netty is Spark's."""


def fetched(jars: Sequence[Jar], java: str) -> list[Path]:
    """The jars in a cache of the user's; skips the test where they cannot be fetched."""
    try:
        return maven_jars.fetched(jars, java)
    except JarsUnavailable as problem:
        pytest.skip(str(problem))
