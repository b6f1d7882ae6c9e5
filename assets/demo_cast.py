"""Who takes part in `make run`: the Dagster runs, the feeder, the command line, the drain sensor; see `demo.py`."""

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
    """The demonstration did not go as it must; the text says what was expected and what was found."""


def say(text: str) -> None:
    print(f"{time.monotonic() - _began:6.1f} s  {text}", flush=True)


class Run:
    """A Dagster run: a child process whose events come as lines of JSON."""

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
        """The run has ended FINISHED, in the expected way."""
        if self.process.wait() != 0 or (status, ended_by) != ("FINISHED", expected):
            raise DemoFailed(
                f"expected {self.name} to end FINISHED by {expected}, found {status} by {ended_by}; {self.failure()}"
            )

    def failure(self) -> str:
        tail = "\n".join(self.log.read_text().splitlines()[-25:])
        return f"the run's process ended with exit code {self.process.wait()}; the end of {self.log}:\n{tail}"


class Feeder:
    """Drops December's files in a thread; rests after certain days until it is told to go on.

    Args:
        data: The flights' files.
        rests: The days after which it rests.
    """

    def __init__(self, data: Any, *, rests: tuple[int, ...]) -> None:
        from assets import feeder

        feeder.reset(data)
        self.days = 0
        self._rests = {day: (threading.Event(), threading.Event()) for day in rests}
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=feeder.feed,
            args=(data,),
            kwargs={"seconds_per_day": SECONDS_PER_DAY, "stop": self._stop, "on_day": self._on_day},
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    def rests_after(self, day: int) -> bool:
        return self._rests[day][0].is_set()

    def go_on(self, day: int) -> None:
        """End the rest after this day."""
        self._rests[day][1].set()

    def stop(self) -> None:
        self._stop.set()
        for _, go_on in self._rests.values():
            go_on.set()

    def _on_day(self, day: str, number: int, days: int) -> None:
        self.days = number
        if number in self._rests:
            say(f"feeder   {day} dropped")
            reached, go_on = self._rests[number]
            reached.set()
            go_on.wait()
        elif number == days:
            say(f"feeder   {day} dropped: all of December")


class CommandLine:
    """`dagster-checkpoints`, in processes of its own, as a person would use it beside the run."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._asked: list[threading.Thread] = []
        self.failure: DemoFailed | None = None

    def call(self, *arguments: str) -> dict[str, Any]:
        """Run a command and wait for it. Returns what it printed as JSON."""
        say(f"shell    $ dagster-checkpoints {' '.join(arguments)}")
        done = subprocess.run(
            [sys.executable, "-m", "dagster_checkpoints.cli", *arguments, "--json"],
            cwd=REPOSITORY,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise DemoFailed(
                f"expected `dagster-checkpoints {' '.join(arguments)}` to succeed, found exit code {done.returncode}: "
                f"{done.stdout}{done.stderr}"
            )
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def verify_savepoints(self) -> None:
        """Have every savepoint read as a whole, and checked whether the pipeline can be restored from it."""
        entries = [entry for listed in self.call("list")["pipelines"] for entry in listed["entries"]]
        for location in [entry["location"] for entry in entries if entry["kind"] == "savepoint"]:
            found = self.call("verify", location, "-m", "assets.flights")
            say(f"shell    {found['files']} files, {found['bytes']:,} bytes, all whole; it fits")

    def ask(self, *arguments: str) -> None:
        """Run a command beside what goes on."""

        def run() -> None:
            try:
                self.call(*arguments)
            except DemoFailed as failed:
                self.failure = failed

        self._asked.append(threading.Thread(target=run, daemon=True))
        self._asked[-1].start()

    def check(self) -> None:
        """Wait for all that was asked, and fail if something of it failed."""
        for thread in self._asked:
            thread.join()
        if self.failure is not None:
            raise self.failure


class SensorTicks:
    """Ticks a sensor as Dagster's daemon does, only more often.

    Args:
        sensor: Of the code location.
        resources: By key.
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
        cursor, told = None, ""
        with dg.DagsterInstance.get() as instance:
            while not self._stop.wait(SENSOR_SECONDS):
                try:
                    with dg.build_sensor_context(instance=instance, cursor=cursor, resources=self._resources) as context:
                        context.log.setLevel(logging.WARNING)  # its answer is told below
                        tick = self._sensor.evaluate_tick(context)
                except Exception as error:
                    self.failure = error
                    return
                cursor = tick.cursor
                if tick.skip_message and tick.skip_message != told:
                    told = tick.skip_message
                    say(f"sensor   {told}")
