"""Checks the number of state partitions that a stage declares: its instances share them evenly, and one column routes its rows.

Must not know: how partitions are numbered, which is `state.key_groups`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagster_checkpoints.pipeline.edges import StageInput
from dagster_checkpoints.pipeline.errors import InvalidStatePartitionsError

HIGHEST_STATE_PARTITIONS = 32768  # they are key groups, of which there are no more


def check_state_partitions(partitions: object, parallelism: int, inputs: Mapping[str, StageInput], where: str) -> None:
    """Check the argument `state_partitions` of a stage.

    Args:
        partitions: The argument; None if the stage has none.
        parallelism: The number of instances of the stage.
        inputs: Its inputs, by the upstream stage's name.
        where: The stage, for errors.

    Raises:
        InvalidStatePartitionsError: What was expected, and what was found.
    """
    if partitions is None:
        return
    if not isinstance(partitions, int) or isinstance(partitions, bool) or not 1 <= partitions <= HIGHEST_STATE_PARTITIONS:
        raise InvalidStatePartitionsError(
            f"{where}: state_partitions={partitions!r}; expected a number of partitions, 1 to {HIGHEST_STATE_PARTITIONS}."
        )
    if partitions % parallelism:
        raise InvalidStatePartitionsError(
            f"{where}: state_partitions={partitions} with {parallelism} instances; expected a multiple of the number of "
            "instances, which share the partitions evenly. The number is fixed with the first checkpoint: choose one that later "
            "numbers of instances divide as well, such as 24 or 120."
        )
    keys = {how.key for how in inputs.values() if how.mode == "stream"}
    if len(keys) != 1 or None in keys:
        raise InvalidStatePartitionsError(
            f"{where}: state_partitions={partitions}; expected inputs whose rows are routed by one column, which is the key of "
            f"the state, found {', '.join(sorted(map(repr, keys))) or 'no stream'}. Name the column for each of them "
            "(StageInput(key=...)), or leave out state_partitions."
        )
