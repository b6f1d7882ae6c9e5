"""What Python's objects return to the JVM arrives there, however soon py4j lets the JVM forget it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from py4j.clientserver import ClientServerConnection, JavaClient
from pyspark.sql import SparkSession

from dagster_checkpoints.spark.query.driver_sources import DriverSources, JavaObject


class Lists(JavaObject):
    """Makes a list of the JVM to which Python keeps no reference."""

    def __init__(self, sources: DriverSources) -> None:
        self._sources = sources

    def get(self) -> Any:
        return self._sources.jvm.java.util.ArrayList()

    class Java:
        implements = ("java.util.function.Supplier",)


@pytest.fixture
def forgetting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python collects its garbage when it has made an answer to the JVM, which forgets all of it before it has the answer."""
    later, answer = JavaClient.garbage_collect_object, ClientServerConnection._call_proxy

    def at_once(self: JavaClient, target_id: str, enqueue: bool = True) -> None:
        thread = threading.Thread(target=later, args=(self, target_id, False))
        thread.start()
        thread.join()

    def answered(self: ClientServerConnection, *arguments: Any) -> str:
        made: str = answer(self, *arguments)
        with monkeypatch.context() as now:
            now.setattr(JavaClient, "garbage_collect_object", at_once)
            gc.collect()
        return made

    monkeypatch.setattr(ClientServerConnection, "_call_proxy", answered)


@pytest.mark.usefixtures("forgetting_at_once")
def test_what_a_source_returns_is_not_null(spark: SparkSession) -> None:
    sources = DriverSources(spark)
    supplier = Lists(sources)
    for _ in range(3):
        made = sources.jvm.java.util.Optional.empty().orElseGet(supplier)
        assert made is not None and made.isEmpty()
