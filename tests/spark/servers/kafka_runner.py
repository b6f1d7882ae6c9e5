"""A pipeline from one topic to another, run in a separate process that can be killed.

    python kafka_runner.py <folder> <settings as JSON>

The settings name the brokers, the topics, the jars of the connector, and the run. When `<folder>/drain` exists, the run drains.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, stage, unbounded_source
from dagster_checkpoints.sinks import KafkaSink
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_session import build_session
from dagster_checkpoints.spark.session.work_directory import parse_work_directory
from dagster_checkpoints.storage import CheckpointStorage, open_store


def pipeline(folder: Path, settings: dict[str, Any]) -> Pipeline:
    options = {
        "kafka.bootstrap.servers": settings["servers"],
        "subscribe": settings["source"],
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": 50,
    }

    @unbounded_source
    def received(context: Any) -> Any:
        return context.spark.readStream.format("kafka").options(**options).load()

    @stage(sink=KafkaSink(settings["target"], settings["servers"], staging=folder / "staging", key="k"))
    def sent(received: Any) -> Any:
        return received.selectExpr("CAST(key AS STRING) AS k", "CAST(value AS STRING) AS v")

    return Pipeline("topics", [received, sent])


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    execution = JobExecution(
        pipeline(folder, settings),
        storage=CheckpointStorage(open_store(str(folder / "store")), "topics"),
        options=JobOptions(
            checkpoints=CheckpointConfig(interval=0.3, retained=2, tolerable_failed_checkpoints=100),
            restart=FixedDelayRestart(20, 0.5),
            work_directory=parse_work_directory(str(folder / f"work-{settings['run_id']}")),
            lease_seconds=6.0,
        ),
        session=lambda: build_session({"spark.master": "local[1]", "spark.jars": ",".join(settings["jars"])}),
        on_event=lambda event: print(event, flush=True),
        run_id=settings["run_id"],
    )
    threading.Thread(target=watch, args=(execution, folder), daemon=True).start()
    result = execution.run()
    print(result, flush=True)
    sys.exit(result.status != "FINISHED")


def watch(execution: JobExecution, folder: Path) -> None:
    parent = os.getppid()
    while True:
        if os.getppid() != parent:
            os._exit(1)  # the tests were interrupted: no process would end this run
        if (folder / "drain").exists():
            (folder / "drain").unlink()
            execution.drain()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
