"""Deliberate faults in bursts: runs that read what is there, and suspend."""

from __future__ import annotations

from dagster_checkpoints.execution import start_point
from dagster_checkpoints.execution.burst import Burst
from dagster_checkpoints.execution.fused_sources import FusedSources
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.split_enumerators import SplitEnumerator
from dagster_checkpoints.execution.task_machine import TaskMachine
from simulation.injection import Fault

BURST_FAULTS = (
    Fault("a burst does not wait for all sources", Burst.request, "if not all(", "if not any("),
    Fault("a burst suspends a job that comes to its own end", Burst.request, "self._more.get(task, True)", "True"),
    Fault("a burst takes sources that have restarted for read", Burst.stopped, "self._more = {}", "self._more = self._more"),
    Fault("a burst does not ask again after a failed suspend", Burst.failed, "self._open = None", "pass"),
    Fault("an unbounded source ends with a burst", TaskMachine._exhausted, "self._burst and", "False and"),
    Fault(
        "the end of a restored source is not known to a burst",
        TaskMachine._opened,
        ", *self._report_read(more=False)",
        "",
        "tasks",
        seed=11_600,
    ),
    Fault("a fused source ends with a burst", FusedSources._not_moved, "in self._to_end", "in self._held"),
    Fault("a split source has caught up before its splits are known", SplitEnumerator.has_read_all, "self._discovered and", ""),
    Fault("a split source has caught up while splits are read", SplitEnumerator.has_read_all, " or self._assigned", ""),
    Fault("a stop does not wait for results that are due", InputGate._take_due, "if self.settling", "if False"),
    Fault("the savepoint of a burst is kept", start_point._start_from, "of_burst or", ""),
)
