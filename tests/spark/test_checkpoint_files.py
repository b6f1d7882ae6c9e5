"""How Spark writes the files of a query into a work directory of this machine, under the settings of a run's session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession


def test_a_file_appears_as_a_whole_alone_and_is_replaced_where_spark_means_it(spark: SparkSession, tmp_path: Path) -> None:
    jvm: Any = spark._jvm
    folder, file = (jvm.org.apache.hadoop.fs.Path(f"file://{path}") for path in (tmp_path, tmp_path / "1.changelog"))
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    manager = jvm.org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager.create(folder, hadoop)

    def write(text: str, replace: bool) -> None:
        stream = manager.createAtomic(file, replace)
        stream.write(bytearray(text.encode()))
        assert [found.read_text() for found in tmp_path.glob("[0-9]*")] == before
        stream.close()

    before: list[str] = []
    write("first", replace=True)
    before = ["first"]
    write("second", replace=True)  # by a task that runs again
    before = ["second"]
    with pytest.raises(Exception, match="already exists"):
        write("third", replace=False)
    assert (tmp_path / "1.changelog").read_text() == "second"
    assert not [found.name for found in tmp_path.iterdir() if found.suffix == ".crc"]
