"""The configuration of one run: its start point. Dagster checks it before it launches the run.

It must not know how a pipeline runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import dagster as dg
from dagster._config import ConfigType, ConfigTypeKind
from dagster._config.errors import PostProcessingError
from pydantic import field_validator

from dagster_checkpoints.files.urls import url_scheme
from dagster_checkpoints.plugin.settings import KnownSettings
from dagster_checkpoints.spark.job.job_options import Until
from dagster_checkpoints.state.claim import ClaimMode

_CHECKPOINT = re.compile(r"(chk-)?\d+")
_LOCATION = re.compile(r"chk-\d+-\d+|savepoint-\d+-[^/]+|.*/.*")


class PipelineRunConfig(KnownSettings, dg.Config):
    """The start point of a pipeline's run.

    In the launchpad it is the configuration of the op, which has the name of the decorated function:

    .. code-block:: yaml

        ops:
          flights_assets:
            config:
              restore_from: none

    Raises:
        pydantic.ValidationError: `restore_from` is none of these.
        UnknownSettingError: There is no setting of that name; the error names the nearest one.

    Examples:
        >>> dg.RunConfig(ops={"flights_assets": PipelineRunConfig(restore_from="none")})
    """

    restore_from: str = "latest"
    """Where the run starts. "latest": the savepoint of a job that was suspended, the newest checkpoint of a job that was
    canceled or failed, a new start after a job that reached its end or was drained. "none": a new start. The id of a retained
    checkpoint, or of a savepoint, such as 42. A location, such as "checkpoints/chk-42-3" or
    "savepoints/savepoint-43-before-upgrade", or a URL; a savepoint's directory may have been copied to any place."""
    until: Until = "end"
    """How long the run goes on. "end": an unbounded stage runs until a request stops it. "caught_up": it reads what is there
    when the run begins; then the pipeline is suspended, and the next run goes on from there: see `build_burst_schedule`."""
    claim_mode: Literal["no_claim", "claim"] = "no_claim"
    """Whose a restored savepoint is. "no_claim": it stays yours; the pipeline does not need it after the first checkpoint has
    completed. "claim": the savepoint becomes the pipeline's own, which deletes it as it deletes old checkpoints."""
    allow_non_restored_state: bool = False
    """Start although the checkpoint holds state of stages that the pipeline no longer has; that state is ignored."""
    allow_moved_pipeline: bool = False
    """Confirm that the pipeline is the one in storage, although its code location and most of its asset keys have changed since
    its latest run."""
    allow_older_checkpoint: bool = False
    """If the checkpoint is corrupt or incomplete, try older retained checkpoints."""
    allow_changed_plan: bool = False
    """Continue with the checkpoint's state although the stateful operators (the length of a window, keys, aggregates) or the
    sources have changed. One output then holds results of both plans."""
    repartition_state: bool = False
    """Write restored state in as many partitions as `spark.sql.shuffle.partitions` says now, instead of the number of the
    checkpoint. It needs RocksDB, and Spark 4.2 or later."""

    @field_validator("restore_from", mode="before")
    @classmethod
    def _check_restore_from(cls, value: Any) -> str:
        return check_restore_from(value)

    @classmethod
    def of(cls, op_config: Mapping[str, Any] | None) -> PipelineRunConfig:
        """The start point in an op's configuration; defaults for settings that it does not have."""
        settings = op_config if isinstance(op_config, Mapping) else {}
        return cls(**{name: settings[name] for name in cls.model_fields if name in settings})


def check_restore_from(value: Any) -> str:
    """Check that a value can name the start point of a run. Returns it as a text: YAML reads 42 as a number.

    Raises:
        ValueError: The value cannot.
    """
    text = str(value) if isinstance(value, int) else value
    if isinstance(text, str) and url_scheme(text) and "://" not in text:
        raise ValueError(
            f'restore_from is {value!r}; expected a URL with two slashes behind the scheme, "{url_scheme(text)}://…"'
        )
    if isinstance(text, str) and (text in ("latest", "none") or _CHECKPOINT.fullmatch(text) or _LOCATION.fullmatch(text)):
        return text
    raise ValueError(
        f'restore_from is {value!r}; expected "latest", "none", the id of a checkpoint or savepoint such as "42", or a '
        'location such as "checkpoints/chk-42-3" or "s3://bucket/prefix/pipeline/savepoints/savepoint-43-before-upgrade"'
    )


class _RestoreFrom(ConfigType):
    """A string, or the number of a checkpoint, that Dagster checks before it launches the run."""

    def __init__(self) -> None:
        super().__init__(key="RestoreFrom", given_name="RestoreFrom", kind=ConfigTypeKind.ANY)

    def post_process(self, value: Any) -> str:
        try:
            return check_restore_from(value)
        except ValueError as error:
            raise PostProcessingError(str(error)) from None


_CLAIM_MODE = dg.Enum("ClaimMode", [dg.EnumValue(mode.value) for mode in ClaimMode])
_UNTIL = dg.Enum("Until", [dg.EnumValue(until) for until in get_args(Until)])


def run_config_schema() -> dict[str, dg.Field]:
    """The schema of :class:`PipelineRunConfig`, for an op."""
    types: dict[str, Any] = {"restore_from": _RestoreFrom(), "claim_mode": _CLAIM_MODE, "until": _UNTIL}
    return {
        name: dg.Field(
            types.get(name, field.annotation), default_value=field.default, description=field.description, is_required=False
        )
        for name, field in PipelineRunConfig.model_fields.items()
    }
