"""Arguments that all tables with versions have in common."""

from __future__ import annotations

from typing import Literal, get_args

from dagster_checkpoints.pipeline.number_values import is_count
from dagster_checkpoints.sources.errors import InvalidSource

ChangedRows = Literal["refuse", "skip"]
"""What happens to a later version that deletes or changes rows: it ends the run, or none of its rows is read."""


def check_arguments(shown: str, files_per_trigger: int, changed_rows: ChangedRows) -> None:
    """Check the arguments of a function that reads such a table.

    Args:
        shown: the function and the table, for errors.
        files_per_trigger: the largest number of data files in one micro-batch.
        changed_rows: what happens to versions that delete or change rows.

    Raises:
        InvalidSource: one of them has no meaning.
    """
    if not is_count(files_per_trigger, least=1):
        raise InvalidSource(f"{shown}: expected files_per_trigger of at least 1, found {files_per_trigger!r}")
    if changed_rows not in get_args(ChangedRows):
        raise InvalidSource(f"{shown}: expected changed_rows 'refuse' or 'skip', found {changed_rows!r}")
