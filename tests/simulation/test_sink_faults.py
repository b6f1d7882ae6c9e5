"""Deliberate faults of a sink's life are found in histories of one instance's sink."""

from __future__ import annotations

import pytest

from simulation.injection import Fault
from simulation.sink_faults import SINK_FAULTS
from simulation.sink_histories import find

HISTORIES = 10_000
"""Histories in which a fault is looked for: some seconds. The one that is hardest to find needs 1,500."""


@pytest.mark.parametrize("fault", SINK_FAULTS, ids=lambda fault: fault.name)
def test_a_deliberate_fault_of_a_sink_is_found(fault: Fault) -> None:
    assert find(fault, HISTORIES) is not None


def test_there_are_enough_deliberate_faults() -> None:
    assert len({fault.name for fault in SINK_FAULTS}) == len(SINK_FAULTS) >= 10
