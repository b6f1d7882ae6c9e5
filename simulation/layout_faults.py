"""Deliberate faults in a restore that divides chains."""

from __future__ import annotations

from dagster_checkpoints.state import divided_chains
from simulation.injection import Fault

LAYOUT_FAULTS = (
    Fault(
        "a part of a divided chain gets the state of all stages in front of it",
        divided_chains._Division._task,
        "for name in stages if name in task.stages",
        "for name in task.stages if whole.index(name) <= whole.index(stages[-1])",
        "rescaling",
    ),
    Fault(
        "a part of a divided chain reads the channels of the chain",
        divided_chains._Division._task,
        "channels=tuple(self._channels(task, stages[0]))",
        "channels=task.channels",
        "rescaling",
    ),
    Fault(
        "a chain is divided behind the end of its data",
        divided_chains.division_obstacle,
        'task.end_of_data == "drain"',
        "False",
        "rescaling",
    ),
    Fault(
        "a fused source that has ended is read again when its chain is divided",
        divided_chains._with_meeting_stages,
        "ended.issuperset(sources)",
        "False",
        "fan-in",
    ),
    Fault(
        "sources that are divided come with the latest event time of all of them",
        divided_chains._Division._channels,
        "[sources[each] for each in self._sources_of(edge.source)]",
        "[max(task.fused, key=lambda each: (each.watermark or 0, each.source))]",
        "fan-in",
    ),
    Fault(
        "a divided source goes on as one of several in a query",
        divided_chains._Division._task,
        "if len(fused) > 1",
        "if fused",
        "fan-in",
    ),
)
