"""`make run`: the flights pipeline through a savepoint, a crash, a suspend and a drain, to the last committed row.

This process serves S3 on loopback, feeds December and follows the runs. The pipeline runs as Dagster runs in child processes
(`demo_run.py`): the first run is killed with SIGKILL, the second is suspended from the command line, the third resumes from
that savepoint and is drained by the sensor. At the end the sinks are compared, row by row, with a batch computation by Spark
over the same files. Exit code 1 if a row differs. The environment
variable SINK chooses where the tables are committed (`flights_sinks`), SOURCE where the live flights come from (`flights_kafka`).
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any

from assets.demo_parts import ROOT, CommandLine, DemoFailed, Feeder, Run, SensorTicks, say
from assets.flights_kafka import kind_of_source, running_broker
from assets.flights_sinks import kind_of_sink
from bench.maven_jars import JarsUnavailable

TABLES = ("hourly_delays", "delays_with_weather")
HALF_OF_DECEMBER = 14
CHRISTMAS = 24
UNTIL_CHRISTMAS = 20_000  # flights of December: the pipeline holds state when it is suspended
DEADLINE_SECONDS = 900.0
_YEAR_3000 = 32_503_680_000_000


def main() -> int:
    say(f"sinks    {kind_of_sink()} (SINK=parquet, delta, files, iceberg, kafka or sql chooses)")
    say(f"source   {kind_of_source()} (SOURCE=files or kafka chooses where the live flights come from)")
    say("S3       starting an S3 on loopback, in this process")
    from resources.embedded_s3 import EmbeddedS3

    shutil.rmtree(ROOT, ignore_errors=True)
    (ROOT / "dagster_home").mkdir(parents=True)
    (ROOT / "dagster_home" / "dagster.yaml").touch()
    os.environ["FLIGHTS_DATA"] = str(ROOT / "flights")
    from assets.flights_data import prepare

    data = prepare(ROOT / "flights", progress=lambda text: say(f"data     {text.strip()}"))
    feeder = Feeder(data, pauses=(HALF_OF_DECEMBER, CHRISTMAS))
    watchdog = threading.Timer(DEADLINE_SECONDS, _time_out)
    watchdog.daemon = True
    watchdog.start()
    try:
        with EmbeddedS3() as s3, _broker():
            os.environ |= {
                **s3.environment,
                "CHECKPOINT_STORAGE": f"{s3.url}/demo",
                "DAGSTER_HOME": str(ROOT / "dagster_home"),
                "PYTHONUNBUFFERED": "1",
            }
            environment = dict(os.environ)
            say(f"S3       checkpoints go to {environment['CHECKPOINT_STORAGE']}")
            shell = CommandLine(environment)
            _until_killed(Run(environment), feeder, shell)
            _until_suspended(Run(environment), feeder, shell)
            _until_drained(Run(environment), feeder)
            shell.verify_savepoints()
            return _compare(data)
    except (DemoFailed, JarsUnavailable) as failed:
        say(f"FAILED   {failed}")
        return 1
    finally:
        feeder.stop()
        watchdog.cancel()


def _broker() -> AbstractContextManager[None]:
    """A Kafka broker, if the source or the sinks need one."""
    if "kafka" not in (kind_of_sink(), kind_of_source()):
        return nullcontext()
    say("Kafka    starting a broker in a process of its own; its jars come from Maven Central")
    return running_broker(TABLES if kind_of_sink() == "kafka" else ())


def _until_killed(run: Run, feeder: Feeder, shell: CommandLine) -> None:
    """Run 1: killed when history has finished, checkpoints start at new roots, and a savepoint of mid-December is complete."""
    run.say("starting (a Dagster run in its own process)")
    history_finished = rerooted = requested = taken = False
    for event in run.events():
        _show(run, event)
        match event["event"]:
            case "JobStarted":
                feeder.start()
            case "StageFinished" if event["stage"] == "flights_history":
                history_finished = True
            case "SavepointDone":
                taken = True
            case "CheckpointDone" if history_finished and not rerooted and "flights_history" not in event["roots"]:
                rerooted = True
                run.say(f"flights_history has finished: checkpoints begin at {', '.join(event['roots'])} now")
        if rerooted and feeder.paused_after(HALF_OF_DECEMBER) and not requested:
            requested = True
            shell.start("savepoint", "--name", "half-of-december")
        if taken and event["event"] == "CheckpointDone":
            run.kill()
            run.say(f"killed with SIGKILL, after {feeder.days} of 31 days of December")
            feeder.resume(HALF_OF_DECEMBER)
            shell.check()
            return
    raise DemoFailed(f"expected {run.name} to run until it is killed, but {run.failure()}")


def _until_suspended(run: Run, feeder: Feeder, shell: CommandLine) -> None:
    """Run 2: takes over from the killed run; suspended from the command line at Christmas. History must not be read again."""
    run.say("starting; it takes the pipeline over as soon as it sees that the killed run's processes have ended")
    requested = False
    status = ended_by = None
    for event in run.events():
        _show(run, event)
        match event["event"]:
            case "JobStarted":
                _check_history_is_finished(run, event)
            case "Result":
                status, ended_by = event["status"], event["ended_by"]
        consumed = event["event"] == "CheckpointDone" and event["stages"]["flights_live"]["rows"] >= UNTIL_CHRISTMAS
        if consumed and feeder.paused_after(CHRISTMAS) and not requested:
            requested = True
            shell.start("stop", "--name", "christmas")
    run.check_end(status, ended_by, "suspend")
    shell.check()


def _until_drained(run: Run, feeder: Feeder) -> None:
    """Run 3: resumes from the suspend's savepoint; drained by the sensor when all of December is consumed."""
    run.say("starting; it resumes from the savepoint by default")
    from definitions import defs
    from resources import coordinator_with

    sensor = SensorTicks(defs.resolve_sensor_def("flights_drain"), {"checkpoint_coordinator": coordinator_with()})
    status = ended_by = None
    try:
        for event in run.events():
            _show(run, event)
            match event["event"]:
                case "JobStarted":
                    _check_history_is_finished(run, event)
                    if "savepoint" not in event["restored_location"]:
                        raise DemoFailed(f"expected {run.name} to resume from the savepoint, found {event}")
                    feeder.resume(CHRISTMAS)
                    sensor.start()
                case "Result":
                    status, ended_by = event["status"], event["ended_by"]
            if sensor.failure is not None:
                raise DemoFailed(f"expected the drain sensor to tick, found {sensor.failure!r}")
    finally:
        sensor.stop()
    run.check_end(status, ended_by, "drain")


def _check_history_is_finished(run: Run, event: dict[str, Any]) -> None:
    if "flights_history" not in event["finished_stages"]:
        raise DemoFailed(f"expected flights_history not to be run again, found {event}")
    run.say("flights_history has finished already: its files are not read again")


def _show(run: Run, event: dict[str, Any]) -> None:
    match event["event"]:
        case "JobStarted" if event["restored_checkpoint"] is None:
            run.say(f"new start; queries: {'; '.join(' -> '.join(chain) for chain in event['chains'])}")
        case "JobStarted":
            run.say(f"restored from {event['restored_location']}")
        case "CheckpointDone":
            finished = ", ".join(event["finished_stages"]) or "none"
            run.say(
                f"checkpoint {event['checkpoint_id']:>3}  {event['duration']:5.1f} s  "
                f"{_size(event['new_bytes'])} new of {_size(event['total_bytes'])}  "
                f"roots: {', '.join(event['roots'])}; finished: {finished}"
            )
            _show_progress(run, event["stages"])
        case "CheckpointNotDone":
            run.say(f"checkpoint {event['checkpoint_id']} not done: {event['reason']}: {event['message']}")
        case "StageFinished" if not event["restored"]:
            run.say(f"{event['stage']} has finished with checkpoint {event['checkpoint_id']}")
        case "JobRestarting":
            run.say(f"restarting: {event['cause']}")
        case "SavepointDone":
            kind = {"": "taken in flight", "suspend": "of the suspend", "drain": "of the drain"}[event["stops"]]
            taken = event["checkpoint"]
            run.say(
                f"savepoint  {taken['checkpoint_id']:>3}  {taken['duration']:5.1f} s  {_size(taken['total_bytes'])}, {kind}: "
                f"{event['location']}"
            )


def _show_progress(run: Run, stages: dict[str, Any]) -> None:
    rows = {name: stage["rows"] for name, stage in stages.items()}
    reached = stages["hourly_delays"]["watermark_ms"]
    through = datetime.fromtimestamp(reached / 1000, UTC) if reached and reached < _YEAR_3000 else None
    run.say(
        f"    {rows['flights_history']:,} flights of history, {rows['flights_live']:,} live, "
        f"{rows['hourly_delays']:,} rows of hourly delays{f', event time {through:%Y-%m-%d %H:%M}' if through else ''}"
    )


def _size(size: int) -> str:
    return f"{size / 1024:8,.0f} KiB"


def _compare(data: Any) -> int:
    say("compare  computing both tables again with Spark in batch, over the same files")
    os.environ.pop("CHECKPOINT_STORAGE", None)
    from assets.reference import compare_table
    from dagster_checkpoints.spark.session.spark_session import build_session

    spark = build_session()
    differ = False
    for table in TABLES:
        comparison = compare_table(spark, data, table)
        differ = differ or not comparison.is_equal or not comparison.expected
        say(
            f"compare  {table:<20} {comparison.expected:,} rows expected, {comparison.missing:,} missing, "
            f"{comparison.duplicated:,} duplicated, {comparison.unexpected:,} unexpected"
        )
    spark.stop()
    say("compare  the tables differ" if differ else "compare  no row is lost or duplicated, and the last one is committed")
    return 1 if differ else 0


def _time_out() -> None:
    say(f"FAILED   expected an end within {DEADLINE_SECONDS:.0f} s; see {ROOT}/run-*.log")
    for run in Run.all:
        run.process.kill()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
