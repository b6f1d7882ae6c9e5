"""The configuration of one run: what it starts from. Checked before the run is launched.

It must not know how a pipeline runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import dagster as dg
from dagster._config import ConfigScalar, ConfigScalarKind
from dagster._config.errors import PostProcessingError
from pydantic import Field, field_validator

from dagster_checkpoints.plugin.settings import KnownSettings
from dagster_checkpoints.state import ClaimMode

_CHECKPOINT = re.compile(r"(chk-)?\d+")
_LOCATION = re.compile(r"chk-\d+-\d+|savepoint-\d+-[^/]+|.*/.*")


class PipelineRunConfig(KnownSettings, dg.Config):
    """What a run of a pipeline starts from.

    In the launchpad it is the configuration of the op, which is called as the decorated function:

    .. code-block:: yaml

        ops:
          flights_assets:
            config:
              restore_from: none

    Args:
        restore_from: "latest": the savepoint of a job that was suspended, the newest checkpoint of one that was canceled or
            failed, a new start after one that has come to its own end or was drained. "none": a new start. The id of a
            checkpoint that is retained, or of a savepoint, such as 42. A location, such as "checkpoints/chk-42-3" or
            "savepoints/savepoint-43-before-upgrade", or a URL; a savepoint's directory may have been copied anywhere.
        claim_mode: "no_claim": a savepoint that is restored stays yours; nothing of it is needed once the first checkpoint has
            completed. "claim": it becomes the pipeline's own, which deletes it as it deletes old checkpoints.
        allow_non_restored_state: Go on although the checkpoint holds state of stages that the pipeline no longer has; it is
            left behind.
        allow_moved_pipeline: The pipeline is the one that storage knows, although its code location and most of its asset keys
            have changed since its latest run.
        allow_older_checkpoint: If the checkpoint is corrupt or incomplete, try older ones that are retained.

        allow_changed_plan: Let the state of the checkpoint go on under other stateful operators (a window of another length,
            other keys or aggregates) or other sources than it was made by. Results of both meet in one output.

    Raises:
        pydantic.ValidationError: `restore_from` is none of these.
        UnknownSettingError: There is no setting of that name; the nearest one is named.

    Examples:
        >>> dg.RunConfig(ops={"flights_assets": PipelineRunConfig(restore_from="none")})
    """

    restore_from: str = Field(
        default="latest",
        description='"latest", "none" for a new start, the id or location of a checkpoint, or a savepoint\'s id, location or URL',
    )
    claim_mode: Literal["no_claim", "claim"] = Field(
        default="no_claim", description="whose a restored savepoint is: yours (no_claim), or the pipeline's to delete (claim)"
    )
    allow_non_restored_state: bool = Field(
        default=False, description="leave behind what the checkpoint holds of stages that no longer exist"
    )
    allow_moved_pipeline: bool = Field(
        default=False, description="it is the pipeline that storage knows, although its code location and its asset keys changed"
    )
    allow_older_checkpoint: bool = Field(
        default=False, description="if the checkpoint is corrupt or incomplete, try older retained ones"
    )

    allow_changed_plan: bool = Field(
        default=False, description="let the checkpoint's state go on although a stage's stateful operators or sources changed"
    )

    @field_validator("restore_from")
    @classmethod
    def _check_restore_from(cls, value: str) -> str:
        return check_restore_from(value)

    @classmethod
    def of(cls, op_config: Mapping[str, Any] | None) -> PipelineRunConfig:
        """The part of an op's configuration that is about the start; the defaults where it has none."""
        given = op_config if isinstance(op_config, Mapping) else {}
        return cls(**{name: given[name] for name in cls.model_fields if name in given})


def check_restore_from(value: str) -> str:
    """`value`, if it can name a place to restore from.

    Raises:
        ValueError: It cannot.
    """
    if value in ("latest", "none") or _CHECKPOINT.fullmatch(value) or _LOCATION.fullmatch(value):
        return value
    raise ValueError(
        f'restore_from is {value!r}; expected "latest", "none", the id of a checkpoint or savepoint such as "42", or a '
        'location such as "checkpoints/chk-42-3" or "s3://bucket/prefix/pipeline/savepoints/savepoint-43-before-upgrade"'
    )


class _RestoreFrom(ConfigScalar):
    """A string that Dagster checks before it launches the run, not when the op has begun."""

    def __init__(self) -> None:
        super().__init__(key="RestoreFrom", given_name="RestoreFrom", scalar_kind=ConfigScalarKind.STRING)

    def post_process(self, value: str) -> str:
        try:
            return check_restore_from(value)
        except ValueError as error:
            raise PostProcessingError(str(error)) from None


_CLAIM_MODE = dg.Enum("ClaimMode", [dg.EnumValue(mode.value) for mode in ClaimMode])


def run_config_schema() -> dict[str, dg.Field]:
    """The schema of :class:`PipelineRunConfig`, for an op."""
    types: dict[str, Any] = {"restore_from": _RestoreFrom(), "claim_mode": _CLAIM_MODE}
    return {
        name: dg.Field(
            types.get(name, field.annotation), default_value=field.default, description=field.description, is_required=False
        )
        for name, field in PipelineRunConfig.model_fields.items()
    }
