"""`DagsterStageTranslator`: how a stage becomes a Dagster asset; users override what should differ.

It must not know how a pipeline runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import cleandoc
from typing import Any

import dagster as dg

from dagster_checkpoints.pipeline import Stage
from dagster_checkpoints.plugin.code_version import code_version
from dagster_checkpoints.sinks.target_sink import TargetSink


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
