"""Calls a stage's functions with its context; their exceptions are reported with the stage's name and the user's line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame

from dagster_checkpoints.pipeline import Stage, StageContext
from dagster_checkpoints.spark.errors import StageError, StageFailedError, StageResultError
from dagster_checkpoints.spark.query.error_location import located
from dagster_checkpoints.spark.query.query_guard import refusing_queries
from dagster_checkpoints.spark.query.spark_advice import advice_on_stage_error
from dagster_checkpoints.spark.query.stage_results import no_dataframe
from dagster_checkpoints.spark.query.stage_settings import keeping_settings


@dataclass(frozen=True)
class StageCall:
    """A stage with the context of the instance that is being built."""

    stage: Stage
    context: StageContext


def open_stage(call: StageCall) -> None:
    """Call a stage's `open`.

    Raises:
        StageError: `open` raised; names the user's line.
    """
    try:
        with refusing_queries(call.stage, call.context.instance), keeping_settings(call.stage, call.context):
            call.stage.open(call.context)
    except StageError:
        raise
    except Exception as error:
        raise _failed(call, error, "open() failed ") from error


def transform_stage(call: StageCall, arguments: Mapping[str, DataFrame]) -> DataFrame:
    """Call a stage's `transform`.

    Raises:
        StageError: `transform` raised, then the text names the user's line; or it did not return a DataFrame.
    """
    stage = call.stage
    try:
        with refusing_queries(call.stage, call.context.instance), keeping_settings(call.stage, call.context):
            result = stage.transform(call.context, **arguments)
    except StageError:
        raise
    except Exception as error:
        raise _failed(call, error, "failed ") from error
    problem = no_dataframe(result)
    if problem:
        raise StageResultError(
            stage.name,
            call.context.instance,
            f"expected its function ({stage.location}) to return a Spark DataFrame, found {problem}.",
        )
    return result


def _failed(call: StageCall, error: Exception, what: str) -> StageFailedError:
    text = located(error, call.stage, advice_on_stage_error(error))
    return StageFailedError(call.stage.name, call.context.instance, f"{what}{text}")
