"""Union list state: a checkpoint must not complete with which some instances of its stage end while others run."""

from __future__ import annotations

from typing import Literal

import pytest

from dagster_checkpoints.state.errors import PartlyFinishedUnionState
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    OperatorState,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.restore import check_union_states


@pytest.mark.parametrize(
    ("kind", "waiting", "refused"),
    [
        ("checkpoint", (), False),
        ("checkpoint", (1,), True),
        ("checkpoint", (0, 1), False),
        # From a savepoint they are restored as they are: at their end of data, with their states.
        ("savepoint", (1,), False),
    ],
)
def test_all_instances_with_union_state_end_with_one_checkpoint(
    kind: Literal["checkpoint", "savepoint"], waiting: tuple[int, ...], refused: bool
) -> None:
    stages = {"V0": StageInstanceSnapshot(operator_states=(OperatorState("offsets", "union"),))}
    tasks = {i: TaskSnapshot(stages=stages, end_of_data="drain" if i in waiting else "none") for i in range(2)}
    metadata = CheckpointMetadata(
        "p",
        4,
        stages=(StageMetadata("V0", 2, ("0", "1")),),
        chains=(ChainMetadata("V0", ("V0",), tasks),),
        kind=kind,
    )
    if refused:
        with pytest.raises(PartlyFinishedUnionState, match=r"'V0'.*'offsets'.*instances '1'"):
            check_union_states(metadata)
    else:
        check_union_states(metadata)
