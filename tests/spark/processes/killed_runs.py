"""Runs of the pipelines of `crash_runner.py` in processes that can be killed, and their input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.spark.numbered_feed import numbered_rows
from tests.spark.processes import crash_runner

ROOT = Path(__file__).parents[3]
RUNNER = Path(__file__).with_name("crash_runner.py")
DEADLINE = 600.0
ROWS = "k string, ts timestamp, v long"
HISTORY_FILES = 12
LIVE_FILES = 3  # of each instance, before each run


class Child:
    """A run of the crashing pipeline in a separate process group."""

    def __init__(self, folder: Path, run_id: str, **settings: Any) -> None:
        self.run_id = run_id
        self._events = folder / "events" / f"{run_id}.jsonl"
        self._log = folder / f"{run_id}.log"
        command = [sys.executable, str(RUNNER), str(folder), json.dumps({"run_id": run_id, **settings})]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = self._events.read_text().split("\n")[:-1] if self._events.exists() else []
        found = [json.loads(line) for line in lines]
        return [event for event in found if kind in (None, event["event"])]

    def wait_for(self, kind: str, where: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        until = time.monotonic() + DEADLINE
        while True:
            over = self.process.poll() is not None
            for event in self.events(kind):
                if where(event):
                    return event
            assert not over, f"the run ended without the expected {kind}\n{self.story()}"
            assert time.monotonic() < until, f"no such {kind}\n{self.story()}"
            time.sleep(0.05)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None and time.monotonic() < until, self.story()
            time.sleep(0.05)

    def kill(self, group: bool = True) -> None:
        """SIGKILL, to the Python process alone or with the JVM."""
        if group:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait(30)

    def kill_java(self) -> None:
        """SIGKILL to the JVM alone, as the kernel does when no memory is left."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (java,) = [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "java"]
        os.kill(java, signal.SIGKILL)

    def end(self) -> dict[str, Any]:
        """Wait until the process has ended by itself. Returns its event of the result."""
        self.process.wait(DEADLINE)
        return self.events("Ended")[-1] if self.events("Ended") else {"status": self.story()}

    def story(self) -> str:
        events = "\n".join(str(event)[:300] for event in self.events() if event["event"] != "Rows")
        return f"{self.run_id}:\n{events}\nlog:\n{self._log.read_text()[-3000:]}"


def drain_when_consumed(folder: Path, rows: Mapping[str, int]) -> None:
    """Let a run, or the next one, drain when it has read these numbers of rows from its sources."""
    scratch = folder / "drain-at.next"
    scratch.write_text(json.dumps(rows))
    scratch.rename(folder / "drain-at.json")


class Feed:
    """The input of the crashing pipeline, and the result of a batch computation over it."""

    def __init__(self, lab: Any, history_files: int = HISTORY_FILES) -> None:
        self.lab = lab
        self.live_rows = 0
        self.history_rows = history_files * 30
        self._minute = dict.fromkeys("abc", 0)
        lab.put("names", "k string, name string", [("a", "Anna"), ("b", "Bob"), ("c", "Carl")])
        for number in range(history_files):
            minutes = range(number * 30, number * 30 + 30, 3)
            lab.put("history", ROWS, [(k, lab.at(60 * m), m) for m in minutes for k in "abc"])
        for instance in "abc":
            lab.input(f"live-{instance}")

    def more(self) -> None:
        for instance in "abc":
            for _ in range(LIVE_FILES):
                begin = self._minute[instance]
                rows = [(instance, self.lab.at(60 * m + 1), m) for m in range(begin, begin + 30, 3)]
                self.lab.put(f"live-{instance}", ROWS, rows)
                self._minute[instance] += 30
                self.live_rows += len(rows)

    def drain_when_consumed(self) -> None:
        drain_when_consumed(self.lab.folder, {"live": self.live_rows, "history": self.history_rows})

    def rows(self, numbered: bool = False) -> Any:
        """Everything that was put, as one DataFrame; the rows of the live feeds numbered or not."""
        rows = self.lab.table("history", ROWS)
        for instance in "abc":
            table = self.lab.table(f"live-{instance}", ROWS)
            rows = rows.unionByName(numbered_rows(table) if numbered else table, allowMissingColumns=True)
        return rows

    def check(self, numbered: bool = False) -> None:
        rows = self.rows(numbered)
        named = crash_runner.with_names(rows, self.lab.table("names", "k string, name string"))
        self.lab.check(named, "named")
        self.lab.check(crash_runner.in_hours(named), "hours")
