"""The checks of stages' commits as Dagster's asset checks: their definitions, and their results.

It must not know when results are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from dagster_checkpoints.pipeline import CheckEvaluation, CommitCheckResult, Pipeline
from dagster_checkpoints.pipeline.quarantine import CHECK as QUARANTINE

_OF_QUARANTINE = "The number of rows that do not meet the stage's conditions is within its limits."


def check_specs(pipeline: Pipeline, keys: Mapping[str, dg.AssetKey]) -> list[dg.AssetCheckSpec]:
    """The asset checks of a pipeline's stages.

    Args:
        pipeline: The pipeline.
        keys: Asset keys by stage.
    """
    declared = [
        dg.AssetCheckSpec(check.name, asset=keys[stage.name], description=check.description, blocking=check.blocking)
        for stage in pipeline.stages
        for check in stage.checks
    ]
    counted = [
        dg.AssetCheckSpec(QUARANTINE, asset=keys[stage.name], description=_OF_QUARANTINE, blocking=stage.quarantine.limited)
        for stage in pipeline.stages
        if stage.quarantine is not None and stage.sink is not None
    ]
    return [*declared, *counted]


def of_all_instances(evaluations: Iterable[CheckEvaluation]) -> list[CheckEvaluation]:
    """One result for each check: passed if the rows of every instance have passed; its checkpoint is the newest one."""
    by_check: dict[str, list[CheckEvaluation]] = {}
    for evaluation in evaluations:
        by_check.setdefault(evaluation.check, []).append(evaluation)
    return [_together(of_check) for of_check in by_check.values()]


def _together(evaluations: list[CheckEvaluation]) -> CheckEvaluation:
    newest = {evaluation.instance: evaluation for evaluation in evaluations}
    first, *others = newest.values()
    if not others:
        return first
    found = {instance: evaluation.result for instance, evaluation in newest.items()}
    failed = {instance: result for instance, result in found.items() if not result.passed}
    described = [f"{instance}: {result.description or 'not passed'}" for instance, result in failed.items()]
    result = CommitCheckResult(
        passed=not failed,
        description="; ".join(described) or None,
        metadata={f"{instance}: {label}": value for instance, each in found.items() for label, value in each.metadata.items()},
    )
    checkpoint_id = max(evaluation.checkpoint_id for evaluation in newest.values())
    return CheckEvaluation(first.check, "", checkpoint_id, first.blocking, result)


class HeldChecks:
    """The results that are not reported yet: of each check the newest, or the newest that has not passed."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, CheckEvaluation]] = {}
        self._newest: dict[str, dict[str, CheckEvaluation]] = {}

    def add(self, stage: str, evaluations: Iterable[CheckEvaluation]) -> None:
        """Hold the results of a commit.

        Args:
            stage: Name of the stage.
            evaluations: The results of its instances.
        """
        held = self._held.setdefault(stage, {})
        for evaluation in of_all_instances(evaluations):
            self._newest.setdefault(stage, {})[evaluation.check] = evaluation
            known = held.get(evaluation.check)
            if known is None or known.result.passed or not evaluation.result.passed:
                held[evaluation.check] = evaluation

    def take(self, stage: str) -> list[CheckEvaluation]:
        """The results of a stage, which count as reported."""
        return list(self._held.pop(stage, {}).values())

    def end(self, stage: str) -> tuple[list[CheckEvaluation], list[CheckEvaluation]]:
        """The results at a stage's end: the newest of each check, reported or not; before them failures not reported yet."""
        newest = list(self._newest.pop(stage, {}).values())
        return [evaluation for evaluation in self.take(stage) if evaluation not in newest], newest


def evaluation_event(key: dg.AssetKey, evaluation: CheckEvaluation) -> dg.AssetCheckEvaluation:
    """The event that shows a result while the stage runs."""
    return dg.AssetCheckEvaluation(blocking=evaluation.blocking, **_shown(key, evaluation))


def check_result(key: dg.AssetKey, evaluation: CheckEvaluation) -> dg.AssetCheckResult:
    """The result that comes with the stage's end."""
    return dg.AssetCheckResult(**_shown(key, evaluation))


def _shown(key: dg.AssetKey, evaluation: CheckEvaluation) -> dict[str, Any]:
    return {
        "asset_key": key,
        "check_name": evaluation.check,
        "passed": evaluation.result.passed,
        "metadata": {**evaluation.result.metadata, "checkpoint": evaluation.checkpoint_id},
        "severity": dg.AssetCheckSeverity.ERROR if evaluation.blocking else dg.AssetCheckSeverity.WARN,
        "description": evaluation.result.description,
    }
