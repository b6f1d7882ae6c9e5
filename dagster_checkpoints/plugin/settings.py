"""Settings with names: one that does not exist is refused, and the nearest one that does is named.

Pydantic ignores what a model does not know, so a misspelt setting would silently keep its default.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline.names import suggestion


class UnknownSettingError(DagsterCheckpointsError):
    """A setting is given that does not exist; usually its name is misspelt."""


class KnownSettings(BaseModel):
    """A base class beside `dagster.Config` or `dagster.ConfigurableResource`: settings that are not its fields are refused.

    A subclass with further fields, or one that allows unknown settings (`extra="allow"`), behaves as it declares.

    Raises:
        UnknownSettingError: Names the settings that do not exist, and the nearest ones that do.
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
        return data
