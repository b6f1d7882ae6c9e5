"""How a stage becomes a Dagster asset: `DagsterStageTranslator`; users override what should differ.

The code version is a hash of the stage's source code and settings, as far as they are known without Spark. It must not know how a
pipeline runs.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import cleandoc
from typing import Any

import dagster as dg

from dagster_checkpoints.pipeline import FunctionSplitSource, SplitSource, Stage
from dagster_checkpoints.pipeline.decorators import FunctionStage
from dagster_checkpoints.sinks.target_sink import TargetSink

_LENGTH = 16


def code_version(stage: Stage) -> str | None:
    """A hash of a stage's code and settings; None if its source code cannot be read, as that of an interactive session.

    Comments, line breaks and the code that the stage calls do not count. Neither do the settings of its sink, which differ
    between machines: of the sink only the class counts. Another version of Python may give another hash.

    Args:
        stage: The stage.
    """
    sources = [_source(code) for code in _code_of(stage)]
    if None in sources:
        return None
    settings = (
        stage.kind.value,
        stage.instances,
        sorted(stage.inputs.items()),
        stage.watermark,
        stage.event_time,
        stage.output_mode,
        f"{type(stage.sink).__module__}.{type(stage.sink).__qualname__}",
    )
    known: tuple[object, ...] = (sources, settings)
    if stage.quarantine is not None:  # the source code of a function that is a condition is that of the stage's definition
        known += ([condition for condition in stage.quarantine.conditions.items() if isinstance(condition[1], str)],)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:_LENGTH]


def _code_of(stage: Stage) -> list[Any]:
    """The user's function, or the user's classes."""
    if stage.takes_refused_rows:
        return []  # the class is the plugin's
    if isinstance(stage, FunctionStage):
        return [inspect.unwrap(stage.function)]
    if isinstance(stage, FunctionSplitSource):
        return [inspect.unwrap(function) for function in stage.code]
    return [kind for kind in type(stage).__mro__ if issubclass(kind, Stage) and kind not in (Stage, SplitSource)]


def _source(code: Any) -> str | None:
    """The source code without comments and layout; None if it cannot be read."""
    with suppress(OSError, TypeError, SyntaxError):
        return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(code))))
    return None


class DagsterStageTranslator:
    """Says key, group, owners and other attributes of a stage's asset; each method can be overridden.

    The plugin adds what it needs itself: the dependencies within the pipeline, its own metadata, and a tag. The arguments
    `key_prefix`, `group_name` and `tags` of :func:`pipeline_assets` apply to all stages: the prefix comes before the translator's
    key, the group is that of stages to which the translator gives none, and the translator's tags replace tags of the same names.
    Override :meth:`get_asset_spec` for what has no method of its own, such as kinds or further dependencies.

    Examples:
        >>> class Translator(DagsterStageTranslator):
        ...     def get_owners(self, stage: Stage) -> Sequence[str]:
        ...         return ["team:flights"]
    """

    def get_asset_spec(self, stage: Stage) -> dg.AssetSpec:
        """The whole asset; default: what the other methods say, of the kinds ``spark`` and that of the stage's sink.

        Examples:
            >>> class Translator(DagsterStageTranslator):
            ...     def get_asset_spec(self, stage: Stage) -> dg.AssetSpec:
            ...         return super().get_asset_spec(stage).replace_attributes(kinds={"spark", "gold"})
        """
        return dg.AssetSpec(
            key=self.get_asset_key(stage),
            description=self.get_description(stage),
            metadata=self.get_metadata(stage),
            group_name=self.get_group_name(stage),
            code_version=self.get_code_version(stage),
            automation_condition=self.get_automation_condition(stage),
            freshness_policy=self.get_freshness_policy(stage),
            owners=self.get_owners(stage),
            tags=self.get_tags(stage),
            kinds={"spark", stage.sink.kind} if isinstance(stage.sink, TargetSink) else {"spark"},
        )

    def get_asset_key(self, stage: Stage) -> dg.AssetKey:
        """The asset's key; default: the stage's name. No two stages of a pipeline may have the same."""
        return dg.AssetKey([stage.name])

    def get_description(self, stage: Stage) -> str | None:
        """The asset's description; default: the docstring of the stage."""
        return cleandoc(stage.description) if stage.description else None

    def get_metadata(self, stage: Stage) -> Mapping[str, Any]:
        """Metadata of the asset, beside the plugin's own; default: none."""
        return {}

    def get_tags(self, stage: Stage) -> Mapping[str, str]:
        """The asset's tags; default: none."""
        return {}

    def get_group_name(self, stage: Stage) -> str | None:
        """The asset's group; default: that of `pipeline_assets`."""
        return None

    def get_owners(self, stage: Stage) -> Sequence[str]:
        """The asset's owners: e-mail addresses, or teams such as `team:flights`; default: none."""
        return []

    def get_code_version(self, stage: Stage) -> str | None:
        """The asset's code version; default: a hash of the stage's source code and settings.

        Code that the stage calls does not count: a stage that depends on other modules says their version here.
        """
        return code_version(stage)

    def get_automation_condition(self, stage: Stage) -> dg.AutomationCondition[dg.AssetKey] | None:
        """When Dagster materializes the asset by itself; default: never.

        One run executes all unfinished stages together, and refuses to run without one of them. So all stages have the same
        condition, and one that becomes true for all at once, such as `cron_tick_passed`; not one that looks at other assets or at
        what was materialized, such as `on_cron`. No condition looks whether a run is alive; `run_schedule` of
        :func:`build_pipeline_defs` skips the ticks at which one is.
        """
        return None

    def get_freshness_policy(self, stage: Stage) -> dg.FreshnessPolicy | None:
        """When the asset counts as stale; default: never. A stage with a sink is materialized while it runs, see
        `materialize_every`."""
        return None
