"""Names of Java classes that this process asks the JVM for once.

py4j keeps no answer: for `jvm.org.apache.spark.sql.X` it asks for every part of the name, at every use, and the JVM looks for a
class of that name, then of that name in each imported package, in every jar of the class path (some 250). Names that are
packages, and classes that were found, do not change while the JVM lives; a class that was not found may come with a jar that is
added later, so it is asked for again. Must not know what the classes are for.

Source: py4j's `JVMView`, `JavaPackage`, and its Java `TypeUtil.forName`.
"""

from __future__ import annotations

from typing import Any

from py4j.java_gateway import JavaClass, JavaPackage, JVMView


def remember_names(jvm: JVMView) -> None:
    """Let a JVM's view keep the packages and classes that were found; every user of the view has the benefit. Idempotent."""
    jvm.__class__ = _RememberingView


class _RememberingView(JVMView):  # type: ignore[misc]  # py4j has no types
    def __getattr__(self, name: str) -> Any:
        return _remembered(self, name, super().__getattr__(name))


class _RememberingPackage(JavaPackage):  # type: ignore[misc]
    def __getattr__(self, name: str) -> Any:
        return _remembered(self, name, super().__getattr__(name))


def _remembered(place: Any, name: str, found: Any) -> Any:
    if type(found) is JavaPackage and name[:1].islower():  # any name that is no class is a package, for py4j
        found = _RememberingPackage(found._fqn, found._gateway_client, found._jvm_id)
    elif not isinstance(found, JavaClass):
        return found
    place.__dict__[name] = found  # from now on Python finds it before it calls __getattr__
    return found
