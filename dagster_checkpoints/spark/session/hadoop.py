"""What makes Hadoop cheap in a session: settings without the names of their files, and local files without processes.

Spark sends all of Hadoop's settings with each stateful operator, each scan and each write of each micro-batch: more than 1,000
defaults, and for each one the name of its file, as a gzip stream of its own. That was a fifth of a small micro-batch. Settings
that a program has made keep their origin.

Hadoop's native library is not part of PySpark. Without it Hadoop starts `chmod` for each file and folder that it creates, and
`readlink` four times for each file that it renames: 25 processes for a small micro-batch with state, a fifth of its time. A
session on one machine takes two classes in Java instead; the executors of a cluster do not have them: there Hadoop's own stay.
`LocalFiles.java` is compiled by Janino, the compiler that Spark compiles its queries with; the result lies beside it, and a test
compares the two.

Source: Hadoop's `Configuration.write` and `getPropertySources`, which only explain where a setting is from; `RawLocalFileSystem`,
`FileContext` and `fs.AbstractFileSystem.file.impl`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def forget_files_of_defaults(spark: SparkSession) -> bool:
    """Let a session's Hadoop settings forget the files that their defaults are from.

    Returns:
        Whether they have forgotten them; if not, everything works as before, only slower.
    """
    jvm: Any = spark._jvm
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    try:
        jvm.org.apache.hadoop.mapred.JobConf()  # its defaults would come later, and the files of all with them
        defaults = jvm.org.apache.hadoop.conf.Configuration()
        defaults.size()  # reads the files
        origins = _field(jvm, "updatingResource")
        names = jvm.java.util.HashSet(origins.get(defaults).keySet())
        set_by_programs = _field(jvm, "overlay").get(settings)
        if set_by_programs is not None:
            names.removeAll(set_by_programs.keySet())
        settings.size()
        origins.get(settings).keySet().removeAll(names)
    except Exception as error:  # another Hadoop
        _LOG.debug("Hadoop's settings keep the names of their files: %s", error)
        return False
    return True


def _field(jvm: Any, name: str) -> Any:
    field = jvm.java.lang.Class.forName("org.apache.hadoop.conf.Configuration").getDeclaredField(name)
    field.setAccessible(True)
    return field


SOURCE = Path(__file__).with_name("LocalFiles.java")
CLASSES = Path(__file__).with_name("java_classes")
UNCHECKED = "fs.AbstractFileSystem.file.impl"
WITHOUT_CHECKSUMS = "org.apache.hadoop.fs.local.RawLocalFs"
_CHECKED = "fs.file.impl"
_PACKAGE = "dagster_checkpoints.LocalFiles"
_LOG = logging.getLogger("dagster_checkpoints")


def use_local_files(spark: SparkSession) -> bool:
    """Let a session's local files be written without processes, if it runs on one machine and does not name other classes.

    Returns:
        Whether it does now.
    """
    jvm: Any = spark._jvm
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    names = {UNCHECKED: f"{_PACKAGE}$Unchecked", _CHECKED: f"{_PACKAGE}$Checked"}
    if hadoop.get(UNCHECKED) == names[UNCHECKED]:
        return True  # a session that was prepared before
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    if (
        not spark.sparkContext._jsc.isLocal()
        or hadoop.get(UNCHECKED) != WITHOUT_CHECKSUMS
        or hadoop.get(_CHECKED) is not None
        or loader.getClass().getSimpleName() != "MutableURLClassLoader"
    ):
        return False
    try:
        loader.addURL(jvm.java.io.File(f"{CLASSES}/").toURI().toURL())
        for name in names.values():
            loader.loadClass(name)
    except Exception as error:  # a package in an archive, another Hadoop: everything works without the classes
        _LOG.debug("Hadoop's own local files are used: %s", error)
        return False
    for key, name in names.items():
        hadoop.set(key, name)
    # Hadoop keeps one object for all local files; the next one is of the new class.
    jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI("file:///"), hadoop).close()
    return True


def compiled(jvm: Any) -> dict[str, bytes]:
    """The classes of the source, by the name of their file, as Spark's compiler makes them.

    Args:
        jvm: a session's `_jvm`.
    """
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setTargetVersion(8)
    compiler.setSourceVersion(8)
    compiler.cook(SOURCE.read_text())
    return {f"{name.replace('.', '/')}.class": bytes(code) for name, code in compiler.getBytecodes().items()}
