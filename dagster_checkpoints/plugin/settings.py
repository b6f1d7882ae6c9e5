"""The settings of resources and assets: unknown ones are refused, and literal ones are checked when they are defined.

Pydantic ignores unknown fields, so a misspelt setting would silently keep its default; the most similar known name is suggested.
The value of a `dg.EnvVar` is not known at the definition: the same rules check it when the run starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import dagster as dg
from dagster._config.field_utils import is_dagster_env_var
from dagster._core.definitions.definition_config_schema import DefinitionConfigSchema
from dagster_spark.utils import flatten_dict
from pydantic import BaseModel, ConfigDict, model_validator

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.files.urls import validate_root
from dagster_checkpoints.pipeline.names import suggestion
from dagster_checkpoints.pipeline.setting_values import check_seconds
from dagster_checkpoints.spark.session.spark_session import SparkSettingError, session_config
from dagster_checkpoints.spark.session.work_directory import check_work_directory_named, parse_work_directory


class UnknownSettingError(DagsterCheckpointsError):
    """A given setting does not exist; usually its name is misspelt."""


class InvalidSettingError(DagsterCheckpointsError):
    """A setting has a value that cannot be checked where it is defined."""


_VARIABLES = (dg.EnvVar, type(dg.EnvVar.int("PATH")))


def refuse_unknown(kind: type[BaseModel], data: Mapping[str, Any]) -> None:
    """Refuse settings that a class does not have.

    Args:
        kind: The class.
        data: Its settings, as they are given.

    Raises:
        UnknownSettingError: A setting does not exist; the text names it and the most similar known settings.
    """
    known = [*kind.model_fields, *(field.alias for field in kind.model_fields.values() if field.alias)]
    unknown = [name for name in data if name not in known]
    if unknown:
        raise UnknownSettingError(
            " ".join(f"{kind.__name__} has no setting {name!r}. {suggestion(name, known)}" for name in unknown)
        )


class KnownSettings(BaseModel):
    """A base class beside `dagster.Config` or `dagster.ConfigurableResource`: settings that are not its fields are refused.

    So are a truth value and an infinite number where a number is expected: pydantic takes True as 1.

    A subclass with further fields, or one that allows unknown settings (`extra="allow"`), behaves as it declares.

    Raises:
        UnknownSettingError: A setting does not exist; the text names it and the most similar known settings.
        InvalidSettingError: A setting that is no text is a `dg.EnvVar`.
        InvalidDurationError: A duration is no number of seconds but a text or a timedelta.
        pydantic.ValidationError: A number is not finite, or a truth value.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)
    """Dagster's UI describes a setting by the text below its field."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict) and cls.model_config.get("extra") != "allow":
            refuse_unknown(cls, data)
            cls._refuse_variables(data)
            given = {name: data[name] for name in cls._durations() if name in data}
            check_seconds(cls.__name__, **{name: value for name, value in given.items() if not _reads_as_number(value)})
        return data

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_no_number(cls, data: Any) -> Any:
        for name, field in cls.model_fields.items() if isinstance(data, dict) else ():
            types = {field.annotation, *get_args(field.annotation)}
            value = data.get(name)
            if not types & {int, float} or bool in types or not isinstance(value, bool | float):
                continue
            if isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"{cls.__name__}({name}={value!r}): expected a finite number.")
        return data

    @classmethod
    def _refuse_variables(cls, data: Mapping[str, Any]) -> None:
        """Refuse what Dagster would read from the environment when a run starts, for settings that are checked before."""
        for name, field in cls.model_fields.items():
            value, kinds = data.get(name), {field.annotation, *get_args(field.annotation)}
            if isinstance(value, _VARIABLES) and not kinds & {str, Any}:
                variable = repr(value.env_var_name)
                raise InvalidSettingError(
                    f"{cls.__name__}({name}=...): expected a value, found dg.EnvVar of {variable}, which is read for texts only, "
                    f"when a run starts. Read the variable yourself, with its type: such as float(os.environ[{variable}])."
                )

    @classmethod
    def _durations(cls) -> list[str]:
        """The fields that are durations: numbers whose description says seconds."""
        kinds = (float, float | None)
        fields = cls.model_fields.items()
        return [name for name, field in fields if field.annotation in kinds and "seconds" in (field.description or "").lower()]


def replacing_schema(schema: dg.Field, given: Mapping[str, Any]) -> DefinitionConfigSchema:
    """The schema of a resource's configuration in a run: a setting that the run does not name has the value of the definition.

    Args:
        schema: The schema of the resource's class.
        given: The settings of the definition, as Dagster's configuration has them.
    """
    shape: Any = schema.config_type
    fields = {
        name: dg.Field(field.config_type, default_value=given[name], description=field.description) if name in given else field
        for name, field in shape.fields.items()
    }
    kind = dg.Permissive if isinstance(shape, dg.Permissive) else dg.Shape
    return DefinitionConfigSchema(dg.Field(kind(fields), default_value=dict(given), description=schema.description))


def _reads_as_number(value: Any) -> bool:
    """Whether pydantic reads a value as a number: also a text, as a variable of the environment has it."""
    try:
        return isinstance(value, int | float) or (isinstance(value, str) and float(value) is not None)
    except ValueError:
        return False


def check_definition(storage: str | None, work_directory: str | None, spark: Mapping[str, Any]) -> None:
    """Refuse settings that no run can start with.

    Args:
        storage: Root of the checkpoint storage; None if the environment names it.
        work_directory: URL or path of the work directory; None for the default.
        spark: Settings of the Spark session, nested or flat.

    Raises:
        InvalidStorageUrl: `storage` has an unsupported URL scheme, or is empty, as a variable may be: a run would begin from
            nothing in the default storage.
        WorkDirectoryError: `work_directory` has an unsupported URL scheme, or is missing although Spark's master needs it.
        SparkSettingError: Checkpoints do not work with a Spark setting.
    """
    if storage is not None and _literal(storage):
        validate_root(storage)
    if work_directory is not None and _literal(work_directory):
        parse_work_directory(work_directory)
    settings = session_config({name: value for name, value in flat_settings(spark).items() if _literal(value)})
    check_work_directory_named(settings["spark.master"], named=work_directory is not None)


def run_settings(spark: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the Spark session by their full names, with the values of environment variables.

    Dagster replaces the variables of settings that it knows by name; of these it knows none.

    Args:
        spark: Settings of the Spark session, nested or flat.

    Raises:
        SparkSettingError: An environment variable is not set.
    """
    settings = flat_settings(spark)
    for name, value in settings.items():
        if _literal(value):
            continue
        settings[name] = value.get_value()
        if settings[name] is None:
            raise SparkSettingError(
                f"Spark configuration {name}: expected its value in the environment variable {value.env_var_name}, found that it "
                "is not set. Set it for the process of the run."
            )
    return settings


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a Spark session by their full names; of an environment variable the `dg.EnvVar`.

    Args:
        settings: The settings, nested or flat.
    """
    return dict(flatten_dict(_with_variables(settings)))


def _literal(value: Any) -> bool:
    return not is_dagster_env_var(value)


def _with_variables(value: Any) -> Any:
    """A setting, or several, with `dg.EnvVar` where Dagster's configuration has a mapping in its place."""
    if not isinstance(value, Mapping):
        return value
    return dg.EnvVar(value["env"]) if set(value) == {"env"} else {name: _with_variables(each) for name, each in value.items()}
