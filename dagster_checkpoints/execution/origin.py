"""Which pipeline a directory of the checkpoint storage belongs to, where two pipelines have the same name.

A pipeline changes: its stages are renamed, its code location moves, Dagster's database is made again. So no single fact says
that it is another one; the rule here needs two of them.
"""

from __future__ import annotations

import msgspec


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pipeline is defined, as its latest run knew it; what it did not know is empty.

    Args:
        code_location: name of Dagster's code location.
        instance: id of the Dagster instance.
        assets: keys of the stages' assets, sorted.
    """

    code_location: str = ""
    instance: str = ""
    assets: tuple[str, ...] = ()

    def then(self, later: Origin) -> Origin:
        """What is known after a later run; what that run did not know is kept."""
        return Origin(
            code_location=later.code_location or self.code_location,
            instance=later.instance or self.instance,
            assets=later.assets or self.assets,
        )


UNKNOWN_ORIGIN = Origin()


def is_same_pipeline(known: Origin, found: Origin) -> bool:
    """Whether two origins may be those of one pipeline.

    They are not if the pipelines come from different places (another code location, or another Dagster instance) **and** have
    fewer than half of their asset keys in common, counted from the smaller pipeline. So one that is renamed, restructured or
    given another key prefix where it is remains itself, and so does one that is moved elsewhere with its keys. What is not
    known counts as equal; so do keys of which none are known, for half of none is none.
    """
    places = ((known.code_location, found.code_location), (known.instance, found.instance))
    if all(one == other or not one or not other for one, other in places):
        return True
    return 2 * len(set(known.assets) & set(found.assets)) >= min(len(known.assets), len(found.assets))
