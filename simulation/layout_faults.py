"""Deliberate faults in a restore that divides chains."""

from __future__ import annotations

from dagster_checkpoints.state import divided_chains
from simulation.injection import Fault

LAYOUT_FAULTS = (
    Fault(
        "a part of a divided chain gets the state of all stages in front of it",
        divided_chains._part,
        "stages[first:end] if",
        "stages[:end] if",
        "rescaling",
    ),
    Fault(
        "a part of a divided chain reads the channels of the chain",
        divided_chains._part,
        "    return TaskSnapshot(",
        "    return TaskSnapshot(channels=task.channels,",
        "rescaling",
    ),
    Fault(
        "a chain is divided behind the end of its data",
        divided_chains.division_obstacle,
        'task.end_of_data == "drain"',
        "False",
        "rescaling",
    ),
)
