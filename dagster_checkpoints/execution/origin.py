"""The pipeline that a directory of the checkpoint storage belongs to, if two pipelines have the same name.

A pipeline changes: its stages are renamed, its code location moves, Dagster's database is created again. So one difference does
not prove that it is another pipeline; the rule of this module needs two.
"""

from __future__ import annotations

import msgspec


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pipeline is defined, according to its latest run; fields that the run did not know are empty.

    Args:
        code_location: name of Dagster's code location.
        instance: id of the Dagster instance.
        assets: keys of the stages' assets, sorted.
    """

    code_location: str = ""
    instance: str = ""
    assets: tuple[str, ...] = ()

    def then(self, later: Origin) -> Origin:
        """The origin after a later run; fields that the later run did not know are kept."""
        return Origin(
            code_location=later.code_location or self.code_location,
            instance=later.instance or self.instance,
            assets=later.assets or self.assets,
        )


UNKNOWN_ORIGIN = Origin()


def is_same_pipeline(known: Origin, found: Origin) -> bool:
    """Whether two origins may be those of one pipeline.

    They are not if the pipelines come from different places (another code location, or another Dagster instance) **and** have
    fewer than half of their asset keys in common, counted from the smaller pipeline. So a pipeline that is renamed, restructured
    or given another key prefix in the same place remains the same, and so does one that is moved with its keys. Unknown fields
    count as equal, also unknown keys.
    """
    places = ((known.code_location, found.code_location), (known.instance, found.instance))
    if all(one == other or not one or not other for one, other in places):
        return True
    return 2 * len(set(known.assets) & set(found.assets)) >= min(len(known.assets), len(found.assets))
