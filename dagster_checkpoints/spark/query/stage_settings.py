"""Settings of the job's session that a stage's function changes, and that decide what rows other stages compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dagster_checkpoints.pipeline import Stage, StageContext
from dagster_checkpoints.spark.errors import StageSettingError
from dagster_checkpoints.spark.row_settings import row_settings, set_back


@contextmanager
def keeping_settings(stage: Stage, context: StageContext) -> Iterator[None]:
    """A context in which a stage's function is called, and must leave the settings as they are that decide rows.

    All stages share the job's session: the stages that are planned before would get the setting at a restart, and not before it.

    Raises:
        StageSettingError: The function has changed one; it has its value of before again.
    """
    before = row_settings(context.spark)
    try:
        yield
    finally:
        after = row_settings(context.spark)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        found = [(name, context.spark.conf.get(name, None)) for name in changed]
        for name in changed:
            set_back(context.spark, name, before.get(name))
    if found:
        name, value = found[0]
        raise StageSettingError(
            stage.name,
            context.instance,
            f"expected its function ({stage.location}) to leave the settings of the job's session as they are, found that it has "
            f"set {name}={value}, before {before.get(name, 'not set')}: the plans of the stages in front of it were made without "
            "it, and would be made with it after a restart. Set it for the whole job, in the resource's spark_config; or use a "
            "function that has it as an argument, such as F.from_utc_timestamp for a time zone",
        )
