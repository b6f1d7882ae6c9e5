"""The traces of the runs of the crash tests."""

from __future__ import annotations

from pathlib import Path

from dagster_checkpoints.execution.trace import Created, read, replay


def check_replayed_traces(folder: Path, started: set[str]) -> None:
    """Check that the machines repeat the traces of all runs, also of those that were killed.

    Args:
        folder: the test's folder.
        started: the ids of the runs whose job has started.
    """
    traces = sorted(folder.glob("traces/crashing/*.trace"))
    assert {trace.name.rpartition("-e")[0] for trace in traces} >= started
    for trace in traces:
        with trace.open(encoding="utf-8") as lines:
            entries = list(read(lines))
        kinds = {entry.kind for entry in entries if isinstance(entry, Created)}
        assert "execution.job_machine:JobMachine" in kinds, trace
        assert "execution.task_machine:TaskMachine" in kinds or trace.name.rpartition("-e")[0] not in started, trace
        assert [str(difference) for difference in replay(entries)] == [], trace
