"""The parts of `make run`: the Dagster runs, the feeder, the command line, the drain sensor; see `demo.py`."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = REPOSITORY / ".data" / "demo"
SECONDS_PER_DAY = 0.7
SENSOR_SECONDS = 2.0
_began = time.monotonic()


class DemoFailed(Exception):
    """A step of the demonstration failed; the text says what was expected and what was found."""


def say(text: str) -> None:
    print(f"{time.monotonic() - _began:6.1f} s  {text}", flush=True)


class Run:
    """A Dagster run: a child process that writes its events as lines of JSON."""

    all: ClassVar[list[Run]] = []

    def __init__(self, environment: dict[str, str]) -> None:
        Run.all.append(self)
        self.name = f"run {len(Run.all)}"
        self.log = ROOT / f"run-{len(Run.all)}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "assets.demo_run"],
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def say(self, text: str) -> None:
        say(f"{self.name}    {text}")

    def events(self) -> Iterator[dict[str, Any]]:
        """The run's events, until its process has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def check_end(self, status: str | None, ended_by: str | None, expected: str) -> None:
        """Check that the run has ended FINISHED, by the expected kind of stop."""
        if self.process.wait() != 0 or (status, ended_by) != ("FINISHED", expected):
            raise DemoFailed(
                f"expected {self.name} to end FINISHED by {expected}, found {status} by {ended_by}; {self.failure()}"
            )

    def failure(self) -> str:
        tail = "\n".join(self.log.read_text().splitlines()[-25:])
        return f"the run's process ended with exit code {self.process.wait()}; the end of {self.log}:\n{tail}"


class Feeder:
    """Writes December's files in a thread; pauses after certain days until it is resumed.

    Args:
        data: The files of the flights.
        pauses: The days of December after which it pauses.
    """

    def __init__(self, data: Any, *, pauses: tuple[int, ...]) -> None:
        from assets import feeder

        feeder.reset(data)
        self.days = 0
        self._pauses = {day: (threading.Event(), threading.Event()) for day in pauses}
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=feeder.feed,
            args=(data,),
            kwargs={"seconds_per_day": SECONDS_PER_DAY, "stop": self._stop, "on_day": self._on_day},
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    def paused_after(self, day: int) -> bool:
        return self._pauses[day][0].is_set()

    def resume(self, day: int) -> None:
        """End the pause after this day."""
        self._pauses[day][1].set()

    def stop(self) -> None:
        self._stop.set()
        for _, resumed in self._pauses.values():
            resumed.set()

    def _on_day(self, day: str, number: int, days: int) -> None:
        self.days = number
        if number in self._pauses:
            say(f"feeder   {day} copied")
            reached, resumed = self._pauses[number]
            reached.set()
            resumed.wait()
        elif number == days:
            say(f"feeder   {day} copied: all of December")


class CommandLine:
    """`dagster-checkpoints` in processes beside the run, as a person would use it in a shell."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._threads: list[threading.Thread] = []
        self.failure: DemoFailed | None = None

    def call(self, *arguments: str) -> dict[str, Any]:
        """Run a command and wait for it. Returns what it printed as JSON."""
        say(f"shell    $ dagster-checkpoints {' '.join(arguments)}")
        process = subprocess.run(
            [sys.executable, "-m", "dagster_checkpoints.cli", *arguments, "--json"],
            cwd=REPOSITORY,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            raise DemoFailed(
                f"expected `dagster-checkpoints {' '.join(arguments)}` to succeed, found exit code {process.returncode}: "
                f"{process.stdout}{process.stderr}"
            )
        result: dict[str, Any] = json.loads(process.stdout)
        return result

    def verify_savepoints(self) -> None:
        """Verify every savepoint: that it is complete, and that the pipeline can be restored from it."""
        entries = [entry for listed in self.call("list")["pipelines"] for entry in listed["entries"]]
        for location in [entry["location"] for entry in entries if entry["kind"] == "savepoint"]:
            report = self.call("verify", location, "-m", "definitions")
            say(f"shell    {report['files']} files, {report['bytes']:,} bytes: complete, and fits the pipeline")

    def start(self, *arguments: str) -> None:
        """Run a command in the background."""

        def run() -> None:
            try:
                self.call(*arguments)
            except DemoFailed as failed:
                self.failure = failed

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def check(self) -> None:
        """Wait for the commands in the background; raises the failure of one that failed."""
        for thread in self._threads:
            thread.join()
        if self.failure is not None:
            raise self.failure


class SensorTicks:
    """Evaluates a sensor as Dagster's daemon does, every 2 seconds.

    Args:
        sensor: The sensor.
        resources: Its resources by key.
    """

    def __init__(self, sensor: dg.SensorDefinition, resources: dict[str, object]) -> None:
        self._sensor = sensor
        self._resources = resources
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        cursor, shown = None, ""
        with dg.DagsterInstance.get() as instance:
            while not self._stop.wait(SENSOR_SECONDS):
                try:
                    with dg.build_sensor_context(instance=instance, cursor=cursor, resources=self._resources) as context:
                        context.log.setLevel(logging.WARNING)  # its skip message is printed below
                        tick = self._sensor.evaluate_tick(context)
                except Exception as error:
                    self.failure = error
                    return
                cursor = tick.cursor
                if tick.skip_message and tick.skip_message != shown:
                    shown = tick.skip_message
                    say(f"sensor   {shown}")
