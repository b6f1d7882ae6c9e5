"""The names of Java's classes in a session's JVM. Must not know what they are used for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class _Names:
    """A package, or the root of all: each name below it is looked up once.

    py4j asks the JVM for every part of `jvm.org.apache.spark.sql.Row`, each time that it stands there; and the JVM searches each
    of Spark's jars for a class `org`, a class `org.apache`, and so on, before it knows that these are packages.
    """

    def __init__(self, package: Any, kind: type) -> None:
        self._package = package
        self._kind = kind  # the class of py4j's packages

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._package, name)
        if isinstance(found, self._kind):
            found = _Names(found, self._kind)
        setattr(self, name, found)
        return found


_ROOTS: WeakKeyDictionary[Any, _Names] = WeakKeyDictionary()


def jvm_of(spark: SparkSession) -> Any:
    """The root of the names of Java's classes in a session's JVM: `jvm_of(spark).java.util.HashMap()`.

    For classes that are there from the session's start: what was looked up before its jar was added stays unknown.
    """
    view: Any = spark.sparkContext._jvm
    if view not in _ROOTS:
        _ROOTS[view] = _Names(view, type(view.java))
    return _ROOTS[view]
