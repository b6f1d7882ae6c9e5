"""Deliberate faults in runs that wait for sources: bursts, and drains that read bounded sources to their end."""

from __future__ import annotations

from dagster_checkpoints.execution import start_point
from dagster_checkpoints.execution.burst import Burst
from dagster_checkpoints.execution.fused_sources import FusedSources
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.job_requests import JobRequests
from dagster_checkpoints.execution.sources import SourceEnds
from dagster_checkpoints.execution.splits import SplitEnumerator
from dagster_checkpoints.execution.task_machine import TaskMachine
from simulation.injection import Fault

BURST_FAULTS = (
    Fault("a burst does not wait for all sources", Burst.is_due, "return all(", "return any("),
    Fault("a burst suspends a job that comes to its own end", Burst.is_due, "len(ended) == len(tasks)", "not tasks"),
    Fault(
        "a burst takes sources that have restarted for read", Burst.stopped, "self._read = frozenset()", "self._read = self._read"
    ),
    Fault("a burst does not ask again after a failed suspend", Burst.failed, "self._open = None", "pass"),
    Fault("an unbounded source ends with a burst", TaskMachine._exhausted, "self._burst and", "False and"),
    Fault(
        "the end of a source is not known to a burst",
        TaskMachine._end_of_data,
        ", *self._report_end()",
        "",
    ),
    Fault("a burst does not wait for what is due in fused queries", FusedSources._not_moved, "and settled", "", "fan-in"),
    Fault("a fused source ends with a burst", FusedSources._not_moved, "in self._to_end", "in self._held"),
    Fault("a split source has caught up before its splits are known", SplitEnumerator.has_read_all, "self._discovered and", ""),
    Fault("a split source has caught up while splits are read", SplitEnumerator.has_read_all, " or self._assigned", ""),
    Fault("a stop does not wait for results that are due", InputGate._take_due, "if self.settling", "if False"),
    Fault(
        "a drain does not wait for bounded sources",
        JobRequests.advance,
        'entry.unread and entry.request.bounded == "finish"',
        "False",
    ),
    Fault("a drain takes sources that have restarted for read", SourceEnds.stopped, "set() if", "self._ended if"),
    Fault("a drain does not know of sources that have ended", SourceEnds.take, "self._ended.add", "set().add"),
    Fault("the savepoint of a burst is kept", start_point._start_from, "of_burst or", ""),
)
