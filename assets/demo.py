"""`make run`: the flights pipeline through a crash, to the last committed row.

This process serves S3 on loopback, feeds December and watches. The pipeline runs as a Dagster run in a child process
(`demo_run.py`), which is killed with SIGKILL in the middle and started again; at the end the sinks are compared,
row by row, with a batch computation by Spark over the same files. Exit code 1 if anything differs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = REPOSITORY / ".data" / "demo"
HALF_OF_DECEMBER = 16
SECONDS_PER_DAY = 0.7
DEADLINE_SECONDS = 600.0
_YEAR_3000 = 32_503_680_000_000


class DemoFailed(Exception):
    """The demonstration did not go as it must; the text says what was expected and what was found."""


def say(text: str) -> None:
    print(f"{time.monotonic() - _began:6.1f} s  {text}", flush=True)


_began = time.monotonic()


class Run:
    """One attempt of the Dagster run: a child process whose events come as lines of JSON."""

    all: ClassVar[list[Run]] = []

    def __init__(self, number: int, environment: dict[str, str]) -> None:
        Run.all.append(self)
        self.log = ROOT / f"run-{number}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "assets.demo_run"],
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """The run's events, until its process has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def failure(self) -> str:
        tail = "\n".join(self.log.read_text().splitlines()[-25:])
        return f"the run's process ended with exit code {self.process.wait()}; the end of {self.log}:\n{tail}"


class Feeder:
    """Drops December's files in a thread; pauses in the middle of the month until the run has been killed."""

    def __init__(self, data: Any) -> None:
        from assets import feeder

        feeder.reset(data)
        self.days = 0
        self.half = threading.Event()
        self.go_on = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=feeder.feed,
            args=(data,),
            kwargs={"seconds_per_day": SECONDS_PER_DAY, "stop": self._stop, "on_day": self._on_day},
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.go_on.set()

    def _on_day(self, day: str, number: int, days: int) -> None:
        self.days = number
        if number == HALF_OF_DECEMBER:
            say(f"feeder   {day} dropped: half of December")
            self.half.set()
            self.go_on.wait()
        elif number == days:
            say(f"feeder   {day} dropped: all of December")


def main() -> int:
    say("S3       starting an S3 on loopback, in this process")
    from resources.embedded_s3 import EmbeddedS3

    shutil.rmtree(ROOT, ignore_errors=True)
    (ROOT / "dagster_home").mkdir(parents=True)
    (ROOT / "dagster_home" / "dagster.yaml").touch()
    os.environ["FLIGHTS_DATA"] = str(ROOT / "flights")
    from assets.flights_data import prepare

    data = prepare(ROOT / "flights", progress=lambda text: say(f"data     {text.strip()}"))
    feeder = Feeder(data)
    watchdog = threading.Timer(DEADLINE_SECONDS, _give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        with EmbeddedS3() as s3:
            environment = {
                **os.environ,
                **s3.environment,
                "CHECKPOINT_STORAGE": f"{s3.url}/demo",
                "DAGSTER_HOME": str(ROOT / "dagster_home"),
                "PYTHONUNBUFFERED": "1",
            }
            say(f"S3       checkpoints go to {environment['CHECKPOINT_STORAGE']}")
            _until_killed(Run(1, environment), feeder)
            _until_finished(Run(2, environment))
            feeder.stop()
        return _compare(data)
    except DemoFailed as failed:
        say(f"FAILED   {failed}")
        return 1
    finally:
        feeder.stop()
        watchdog.cancel()


def _until_killed(run: Run, feeder: Feeder) -> None:
    """The first attempt: until history has finished, a checkpoint has begun at new roots, and half of December is in."""
    say("run 1    starting (a Dagster run in a process of its own)")
    history_finished = rerooted = False
    for event in run.events():
        _show("run 1 ", event)
        if event["event"] == "JobStarted":
            feeder.start()
        if event["event"] == "StageFinished" and event["stage"] == "flights_history":
            history_finished = True
        if event["event"] == "CheckpointDone" and history_finished and "flights_history" not in event["roots"]:
            if not rerooted:
                say(f"run 1    flights_history has finished: checkpoints begin at {', '.join(event['roots'])} now")
            rerooted = True
        if rerooted and feeder.half.is_set() and event["event"] == "CheckpointDone":
            run.kill()
            say(f"run 1    killed with SIGKILL, after {feeder.days} of 31 days of December")
            feeder.go_on.set()
            return
    raise DemoFailed(f"expected the first run to go on until it is killed, but {run.failure()}")


def _until_finished(run: Run) -> None:
    """The second attempt: to its own end. History must not be read again."""
    say("run 2    starting; it takes the pipeline over when the lease of run 1 has expired")
    status = None
    for event in run.events():
        _show("run 2 ", event)
        if event["event"] == "JobStarted":
            if "flights_history" not in event["finished_stages"]:
                raise DemoFailed(f"expected flights_history not to be run again, found {event}")
            say("run 2    flights_history is finished in that checkpoint: its files are not read again")
        if event["event"] == "Result":
            status = event["status"]
    if run.process.wait() != 0 or status != "FINISHED":
        raise DemoFailed(f"expected the second run to end FINISHED, found {status}; {run.failure()}")


def _show(who: str, event: dict[str, Any]) -> None:
    match event["event"]:
        case "JobStarted" if event["restored_checkpoint"] is None:
            say(f"{who}   new start; queries: {'; '.join(' -> '.join(chain) for chain in event['chains'])}")
        case "JobStarted":
            say(f"{who}   restored from checkpoint {event['restored_checkpoint']}")
        case "CheckpointDone":
            finished = ", ".join(event["finished_stages"]) or "none"
            say(
                f"{who}   checkpoint {event['checkpoint_id']:>3}  {event['duration']:5.1f} s  "
                f"{_size(event['new_bytes'])} new of {_size(event['total_bytes'])}  "
                f"roots: {', '.join(event['roots'])}; finished: {finished}"
            )
            _show_progress(who, event["stages"])
        case "CheckpointNotDone":
            say(f"{who}   checkpoint {event['checkpoint_id']} not done: {event['reason']}: {event['message']}")
        case "StageFinished" if not event["restored"]:
            say(f"{who}   {event['stage']} has finished with checkpoint {event['checkpoint_id']}")
        case "JobRestarting":
            say(f"{who}   restarting: {event['cause']}")
        case "Draining":
            say(f"{who}   all of December is consumed: draining (every source ends, all windows fire)")


def _show_progress(who: str, stages: dict[str, Any]) -> None:
    rows = {name: stage["rows"] for name, stage in stages.items()}
    reached = stages["hourly_delays"]["watermark_ms"]
    through = datetime.fromtimestamp(reached / 1000, UTC) if reached and reached < _YEAR_3000 else None
    say(
        f"{who}       {rows['flights_history']:,} flights of history, {rows['flights_live']:,} live, "
        f"{rows['hourly_delays']:,} rows of hourly delays{f', event time {through:%Y-%m-%d %H:%M}' if through else ''}"
    )


def _size(size: int) -> str:
    return f"{size / 1024:8,.0f} KiB"


def _compare(data: Any) -> int:
    say("compare  computing both tables again with Spark in batch, over the same files")
    os.environ.pop("CHECKPOINT_STORAGE", None)
    from assets.reference import compare_table
    from dagster_checkpoints.spark.session import build_session

    spark = build_session()
    differ = False
    for table in ("hourly_delays", "delays_with_weather"):
        found = compare_table(spark, data, table)
        differ = differ or not found.is_equal or not found.expected
        say(
            f"compare  {table:<20} {found.expected:,} rows expected, {found.missing:,} missing, "
            f"{found.duplicated:,} duplicated, {found.unexpected:,} unexpected"
        )
    spark.stop()
    say("compare  something differs" if differ else "compare  nothing lost, nothing twice, the last record committed")
    return 1 if differ else 0


def _give_up() -> None:
    say(f"FAILED   expected an end within {DEADLINE_SECONDS:.0f} s; see {ROOT}/run-*.log")
    for run in Run.all:
        run.process.kill()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
