"""The instances of stages that one attempt makes, each with the part of the restored operator state that it begins with.

It must not know plans, channels or tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline import Chain, InputAsset, Pipeline, StageContext
from dagster_checkpoints.spark.query.stage_calls import StageCall, open_stage
from dagster_checkpoints.spark.snapshots.restored_state import RestoredState
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore
from dagster_checkpoints.spark.tasks.task_parts import StageInstance
from dagster_checkpoints.state.metadata import TaskSnapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class StageInstances:
    """Makes instances of stages, and closes those that are not used.

    Args:
        pipeline: The pipeline.
        spark: The session in which the tasks run.
        state: The state that the attempt starts with.
        log: The logger of the stages' `context.log`.
        assets: By stage and key, the assets outside of the pipeline that it reads.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        state: RestoredState,
        log: logging.Logger,
        assets: Mapping[str, Mapping[str, InputAsset]],
    ) -> None:
        self._pipeline = pipeline
        self._spark = spark
        self._state = state
        self._log = log
        self._assets = assets
        self._opened: list[StageInstance] = []

    def of_chain(self, chain: Chain, index: int, snapshot: TaskSnapshot | None) -> tuple[StageInstance, ...]:
        """The instances of a chain's stages, opened; without fused sources that have ended.

        Args:
            chain: The chain.
            index: The index of the instance.
            snapshot: The task's restored snapshot; None without one.

        Raises:
            StageError: A stage's `open` raised.
        """
        instances = []
        ended = snapshot.ended_sources if snapshot is not None else ()
        for name in (name for name in chain.stages if name not in ended):
            restored = snapshot.stages.get(name) if snapshot else None
            own = restored.operator_states if restored else ()
            instance = self.of(name, index, OperatorStateStore(self._state.operator_states(name, index), own))
            open_stage(instance.call)
            self._opened.append(instance)
            instances.append(instance)
        return tuple(instances)

    def of(self, name: str, index: int, state: OperatorStateStore) -> StageInstance:
        """An instance of a stage, not yet opened.

        Args:
            name: The stage.
            index: The index of the instance.
            state: Its operator state.
        """
        stage = self._pipeline.stage(name)
        context = StageContext(
            spark=self._spark,
            stage=name,
            instance=stage.instances[index],
            index=index,
            parallelism=stage.parallelism,
            state=state,
            log=self._log,
            assets=self._assets.get(name, {}),
        )
        own = stage.for_instance()
        return StageInstance(own, StageCall(own, context), state)

    def close(self) -> None:
        """Close the opened instances, whose tasks are not started."""
        for instance in reversed(self._opened):
            instance.close()
        self._opened.clear()
