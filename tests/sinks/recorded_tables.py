"""Tables as a release leaves them at a crash, with the checkpoints of their jobs: `python -m tests.sinks.recorded_tables KIND`.

A later release restores them (`test_recorded_tables.py`), or refuses them by name. A recorded table is never recorded again for a
format that has changed: the new one gets a name of its own.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

import msgspec

from dagster_checkpoints.testing import SinkConformance
from dagster_checkpoints.testing.model_job import ModelCheckpoint, ModelJob
from tests.sinks import test_delta_conformance, test_file_conformance, test_sink_conformance, test_sql_conformance

RECORDED = Path(__file__).parent / "recorded"
INSTANCES = 2
KINDS: dict[str, type[SinkConformance]] = {
    "parquet-2": test_sink_conformance.TestParquetSink,
    "files-2-parquet": test_file_conformance.TestParquetFiles,
    "files-2-orc": test_file_conformance.TestOrcFiles,
    "files-2-csv": test_file_conformance.TestCsvFilesThatReplace,
    "files-2-json": test_file_conformance.TestJsonFilesBesideEarlierOnes,
    "sqlite-2": test_sql_conformance.TestSqlite,
    "sqlite-2-checkpoint-column": test_sql_conformance.TestSqliteWithCheckpointColumn,
    "sqlite-2-by-key": test_sql_conformance.TestSqliteByKey,
    "delta-2": test_delta_conformance.TestDeltaSink,
    "delta-2-by-key": test_delta_conformance.TestDeltaSinkByKey,
    "delta-2-partitions": test_delta_conformance.TestDeltaSinkOfPartitions,
}
"""By name, the suite whose sink and reader the table has."""
FORMER: dict[str, type[SinkConformance]] = {
    "parquet": test_sink_conformance.TestParquetSink,
    "files-parquet": test_file_conformance.TestParquetFiles,
    "files-orc": test_file_conformance.TestOrcFiles,
    "files-csv": test_file_conformance.TestCsvFilesThatReplace,
    "files-json": test_file_conformance.TestJsonFilesBesideEarlierOnes,
    "sqlite": test_sql_conformance.TestSqlite,
    "sqlite-checkpoint-column": test_sql_conformance.TestSqliteWithCheckpointColumn,
    "sqlite-by-key": test_sql_conformance.TestSqliteByKey,
}
"""Likewise, of formats that are read no more."""
FORMER_TEXTS: dict[str, type[SinkConformance]] = {
    "delta": test_delta_conformance.TestDeltaSink,
    "delta-by-key": test_delta_conformance.TestDeltaSinkByKey,
    "delta-partitions": test_delta_conformance.TestDeltaSinkOfPartitions,
}
"""Likewise, of tables that are read, with checkpoints whose transactions are not."""


def model_job(kind: str, folder: Path) -> ModelJob:
    suite = {**KINDS, **FORMER, **FORMER_TEXTS}[kind]
    return ModelJob(suite().make_sink(folder / "target"), folder / "job", INSTANCES)


def record(kind: str, folder: Path) -> list[ModelCheckpoint]:
    """Two checkpoints and a savepoint; the process ends before the last checkpoint is committed.

    Returns:
        The checkpoints from which the job may be restored: the savepoint, and the last one.
    """
    (folder / "target").mkdir()
    job = model_job(kind, folder)
    job.start()
    taken = []
    for number in (1, 2, 3):
        for index in range(INSTANCES):
            job.write(2 + index, index)
        taken.append(job.snapshot(number, savepoint=number == 2))
        if number < 3:
            job.commit(number)
    return taken[1:]


def unpack(kind: str, folder: Path) -> list[ModelCheckpoint]:
    """Extract a recorded table: the checkpoints from which its job may be restored."""
    with tarfile.open(RECORDED / f"{kind}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    text = (folder / "checkpoints.json").read_text().replace("FOLDER", str(folder))
    return msgspec.json.decode(text, type=list[ModelCheckpoint])


def main(kinds: list[str]) -> None:
    RECORDED.mkdir(exist_ok=True)
    for kind in kinds:
        place = RECORDED / f"{kind}.tar.gz"
        if place.exists():
            raise SystemExit(f"{place} exists: a release wrote it. Give the table of a new format a new name.")
        with tempfile.TemporaryDirectory() as folder:
            text = msgspec.json.format(msgspec.json.encode(record(kind, Path(folder)))).decode()
            Path(folder, "checkpoints.json").write_text(text.replace(folder, "FOLDER"))
            with tarfile.open(place, "w:gz") as archive:
                archive.add(folder, ".")


if __name__ == "__main__":
    main(sys.argv[1:])
