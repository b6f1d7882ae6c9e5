"""The recorded chains that a run joins: chosen in its first attempt, and the same in all later ones.

The rule is in `state.joined_chains`. What Spark cannot run as one query is found while the plans are built: these chains stay
apart, and the plans are built again. It must not know how plans are built, nor start anything.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from dagster_checkpoints.pipeline import Pipeline, build_chains
from dagster_checkpoints.spark.query.fused_plans import RefusedAtStage
from dagster_checkpoints.spark.query.joined_plans import QueriesStayApart
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.state import ChainMetadata, JoinedCheckpoint, joined


class ChainJoins:
    """The joined chains of one run.

    Args:
        pipeline: The pipeline that runs.
        log: Is told which chains are joined, and why others stay apart.
    """

    def __init__(self, pipeline: Pipeline, log: logging.Logger) -> None:
        self._pipeline = pipeline
        self._log = log
        self._refused: dict[str, str] = {}
        """By first stage of a chain that Spark cannot run with the stage that it reads: the reason."""
        self._kept: frozenset[str] | None = None
        """The first stages of the recorded chains that the run has joined with others; None before its first attempt is built."""
        self._newest: JoinedCheckpoint | None = None

    def restored(self, restored: Restored | None) -> Restored | None:
        """The checkpoint with the chains that this attempt joins.

        Args:
            restored: The checkpoint; None for a new start.
        """
        self._newest = None
        if restored is None:
            return None
        heads = {chain.name for chain in restored.metadata.chains} if self._kept is None else self._kept
        rescaled = restored.plan.rescaled
        self._newest = joined(
            restored.metadata,
            self._pipeline,
            build_chains(self._pipeline),
            rescaled=rescaled.stages if rescaled is not None else (),
            only=heads - self._refused.keys(),
        )
        if not self._newest.joined:
            return restored
        return replace(restored, metadata=self._newest.metadata, plan=restored.plan.with_joined_chains(self._newest))

    def stay_apart(self, refused: RefusedAtStage | QueriesStayApart) -> bool:
        """Let the chains stay apart that Spark cannot join. Returns False if the refusal is not about joined chains.

        Args:
            refused: What was found while the plans were built.
        """
        chains = self._newest.joined if self._newest is not None else {}
        for name, parts in chains.items():
            about = refused.chain == name if isinstance(refused, QueriesStayApart) else refused.stage in _stages(parts)
            if about:
                self._refused.update(dict.fromkeys((part.name for part in parts[1:]), refused.reason))
                return True
        return False

    def keep(self) -> None:
        """The attempt is built: the later ones of the run have the same chains."""
        if self._kept is None:
            parts = self._newest.joined.values() if self._newest is not None else ()
            self._kept = frozenset(part.name for each in parts for part in each[1:])
            for line in self.changes:
                self._log.info("%s", line)

    @property
    def changes(self) -> tuple[str, ...]:
        """In words, which recorded chains are joined, and why others stay apart."""
        if self._newest is None:
            return ()
        found = [
            f"The queries of {' and '.join(' -> '.join(part.stages) for part in parts)} become one, with their state."
            for parts in self._newest.joined.values()
        ]
        for head, reason in {**self._newest.apart, **self._refused}.items():
            (upstream,) = self._pipeline.upstream(head)
            found.append(f"{upstream!r} and {head!r} could share a query, and keep separate ones: {reason}.")
        return tuple(found)


def _stages(parts: tuple[ChainMetadata, ...]) -> set[str]:
    return {name for part in parts for name in part.stages}
