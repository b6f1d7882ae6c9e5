"""Common to all tests: hypothesis profiles, one Spark session, and servers for the tests that need them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from bench.kafka_broker import KafkaBroker
    from bench.postgresql import PostgresqlServer

# Deadlines are durations, and those belong to bench/. A failing example prints the blob that reproduces it.
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# The JVMs of tests live for seconds or minutes, also those of processes that tests start: for these the quick compiler alone is
# faster, and a collector without threads of its own. The quick compiler alone would get a fifth of the usual room for code, and
# compile again what it had to drop; so would Spark the code of queries, of which tests have more than the 100 that it keeps.
_FOR_SHORT_RUNS = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC -Dspark.sql.codegen.cache.maxEntries=2000"
)
os.environ.setdefault("SPARK_SUBMIT_OPTS", _FOR_SHORT_RUNS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", type=int, choices=range(10), help="run one test of ten, beginning with this one")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tenth = config.getoption("tenth")
    if tenth is not None:
        units = list(dict.fromkeys(map(_unit, items)))
        chosen = set(units[tenth::10])
        config.hook.pytest_deselected(items=[item for item in items if _unit(item) not in chosen])
        items[:] = [item for item in items if _unit(item) in chosen]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = _shared_out(items, workers)


def _unit(item: pytest.Item) -> str:
    """What is chosen as a whole: a test, or all tests of a file that read one dear record (the mark `one_record`)."""
    return item.nodeid.partition("::")[0] if item.get_closest_marker("one_record") else item.nodeid


# Tests that take milliseconds.
_PURE = ("pipeline", "coordination", "execution", "state", "storage", "sources", "spark/pure")


def _shared_out(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests in an order whose parts of equal length, one for each worker, begin with slow tests and end with pure ones.

    Workers that have nothing left take tests from the end of others' parts: so no worker is left with slow tests at the end. The
    tests of a file stay together, because they may share a fixture.
    """
    folders = tuple(f"tests/{folder}/" for folder in _PURE)
    files: dict[str, list[pytest.Item]] = {}
    pure: list[pytest.Item] = []
    for item in items:
        file = item.nodeid.partition("::")[0]
        (pure if file.startswith(folders) else files.setdefault(file, [])).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for number, tests in enumerate(files.values()):
        parts[number % workers] += tests
    size = -(-len(items) // workers)
    for part in parts:
        missing = max(0, size - len(part))
        part += pure[:missing]
        del pure[:missing]
    return [item for part in parts for item in part] + pure


@pytest.fixture
def chance() -> random.Random:
    """Random numbers: the same in each run of CI, others elsewhere. A test that fails prints their seed."""
    seed = 0 if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One local session with two cores, for all tests that run Spark in this process."""
    from dagster_checkpoints.spark.session.spark_session import build_session

    session = build_session(
        {
            "spark.master": "local[2]",
            "spark.app.name": "tests",
            "spark.sql.shuffle.partitions": 2,
            "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        },
        share_classes=True,
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """One PostgreSQL server for each process that runs tests."""
    from bench.postgresql import PostgresqlServer, binaries

    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed: apt-get install postgresql")
    server = PostgresqlServer(programs)
    yield server
    server.close()


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaBroker]:
    """One Kafka broker for each process that runs tests."""
    from bench import maven_jars
    from bench.kafka_broker import BROKER, KafkaBroker
    from dagster_checkpoints.spark.session.java import find_java_home

    java = f"{find_java_home()}/bin/java"
    try:
        jars = maven_jars.fetched(BROKER, java)
    except maven_jars.JarsUnavailable as problem:
        pytest.skip(str(problem))
    broker = KafkaBroker(java, jars)
    yield broker
    broker.close()


@pytest.fixture
def kafka_jars(kafka: KafkaBroker) -> list[Path]:
    """The jars of Spark's connector for Kafka, with a broker to read from."""
    from bench import maven_jars
    from bench.kafka_broker import CONNECTOR
    from dagster_checkpoints.spark.session.java import find_java_home

    try:
        return maven_jars.fetched(CONNECTOR, f"{find_java_home()}/bin/java")
    except maven_jars.JarsUnavailable as problem:
        pytest.skip(str(problem))
