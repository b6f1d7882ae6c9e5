"""Hadoop's settings are sent to tasks without the name of the file that each default is from.

Spark sends all of Hadoop's settings with each stateful operator, each scan and each write of each micro-batch: more than 1,000
defaults, and for each one the name of its file, as a gzip stream of its own. That was a fifth of a small micro-batch. Settings
that a program has made keep their origin.

Source: Hadoop's `Configuration.write` and `getPropertySources`, which only explain where a setting is from.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG = logging.getLogger("dagster_checkpoints")


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
