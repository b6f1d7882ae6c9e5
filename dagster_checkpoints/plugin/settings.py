"""Refuses unknown settings, and suggests the most similar known name.

Pydantic ignores unknown fields, so a misspelt setting would silently keep its default.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline.durations import check_seconds
from dagster_checkpoints.pipeline.names import suggestion


class UnknownSettingError(DagsterCheckpointsError):
    """A given setting does not exist; usually its name is misspelt."""


class KnownSettings(BaseModel):
    """A base class beside `dagster.Config` or `dagster.ConfigurableResource`: settings that are not its fields are refused.

    A subclass with further fields, or one that allows unknown settings (`extra="allow"`), behaves as it declares.

    Raises:
        UnknownSettingError: A setting does not exist; the text names it and the most similar known settings.
        InvalidDurationError: A duration is not a number of seconds.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict) and cls.model_config.get("extra") != "allow":
            known = [*cls.model_fields, *(field.alias for field in cls.model_fields.values() if field.alias)]
            unknown = [name for name in data if name not in known]
            if unknown:
                raise UnknownSettingError(
                    " ".join(f"{cls.__name__} has no setting {name!r}. {suggestion(name, known)}" for name in unknown)
                )
            given = {name: data[name] for name in cls._durations() if name in data}
            check_seconds(cls.__name__, **{name: value for name, value in given.items() if not _is_number(value)})
        return data

    @classmethod
    def _durations(cls) -> list[str]:
        """The fields that are durations: numbers whose description says seconds."""
        kinds = (float, float | None)
        fields = cls.model_fields.items()
        return [name for name, field in fields if field.annotation in kinds and "seconds" in (field.description or "")]


def _is_number(value: Any) -> bool:
    """Whether a text is a number, as a variable of the environment has it; pydantic reads it."""
    try:
        return isinstance(value, str) and float(value) is not None
    except ValueError:
        return False
