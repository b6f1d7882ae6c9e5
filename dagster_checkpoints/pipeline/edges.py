"""How one stage reads another: the options of an input, and which instances an edge joins.

The two patterns are Flink's (`DistributionPattern`). This module is arithmetic on instance numbers;
it must not know which data an edge carries.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from dagster_checkpoints.pipeline.errors import InvalidStageInputError


class EdgePattern(Enum):
    """Which instances of the upstream stage an instance of the downstream stage reads."""

    POINTWISE = "pointwise"
    """Each instance reads its neighbours, see :func:`pointwise_producers`."""
    ALL_TO_ALL = "all_to_all"
    """Every instance reads every instance."""


@dataclass(frozen=True)
class StageInput:
    """How a stage reads one of its upstream stages.

    Args:
        mode: "stream" reads row by row as they come; "static" waits for the end of a bounded stage and reads
            the whole of it as a table.
        edge: "pointwise", "all_to_all", or None for the default: all_to_all for a static input or with a
            `key`, pointwise otherwise.
        key: The column by which rows are distributed to the instances; equal keys meet in the same instance.
        fuse: None: the stage and the one that it reads share a Spark query where that is possible. False: the stage reads the
            input through a channel; each side has a query of its own, and a long micro-batch of one does not hold the other
            up; a restore divides a query that they shared. True: as None, with a warning where it is not possible.

    Raises:
        InvalidStageInputError: The options contradict each other.
    """

    mode: Literal["stream", "static"] = "stream"
    edge: Literal["pointwise", "all_to_all"] | None = None
    key: str | None = None
    fuse: bool | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("stream", "static"):
            raise InvalidStageInputError(f'StageInput(mode={self.mode!r}): mode is "stream" or "static".')
        if self.edge not in (None, "pointwise", "all_to_all"):
            raise InvalidStageInputError(
                f'StageInput(edge={self.edge!r}): edge is "pointwise", "all_to_all" or None (the default).'
            )
        if self.fuse not in (None, True, False):
            raise InvalidStageInputError(f"StageInput(fuse={self.fuse!r}): fuse is True, False or None (the default).")
        if self.key is not None and (not isinstance(self.key, str) or not self.key):
            raise InvalidStageInputError(f"StageInput(key={self.key!r}): key is the name of a column.")
        if self.key is not None and self.edge == "pointwise":
            raise InvalidStageInputError(
                f'StageInput(edge="pointwise", key={self.key!r}): a key sends every row to the instance '
                f"that owns it, which a POINTWISE edge cannot do. Leave out the edge (a key makes it "
                f'"all_to_all") or the key.'
            )
        if self.mode == "static" and (self.edge == "pointwise" or self.key is not None):
            option = 'edge="pointwise"' if self.edge == "pointwise" else f"key={self.key!r}"
            raise InvalidStageInputError(
                f'StageInput(mode="static", {option}): every instance reads the whole of a static input. '
                f'Leave out {option}, or read the stage with mode="stream".'
            )


def pointwise_producers(s: int, t: int, i: int) -> range:
    """The upstream instances that consumer `i` reads over a POINTWISE edge.

    Args:
        s: Number of upstream instances.
        t: Number of downstream instances.
        i: Number of the consumer, 0 <= i < t.

    Returns:
        A contiguous, never empty range: [i*s/t, (i+1)*s/t) for s >= t, one producer for s < t.
        Flink: `VertexInputInfoComputationUtils.computeConsumedSubpartitionRange`.
    """
    _check_number("consumer", i, t)
    if s >= t:
        return range(i * s // t, (i + 1) * s // t)
    # Producer q feeds [ceil(q*t/s), ceil((q+1)*t/s)): the q with q*t/s <= i is the integer part of i*s/t.
    producer = i * s // t
    return range(producer, producer + 1)


def pointwise_consumers(s: int, t: int, q: int) -> range:
    """The downstream instances that producer `q` feeds over a POINTWISE edge; the inverse of :func:`pointwise_producers`.

    Args:
        s: Number of upstream instances.
        t: Number of downstream instances.
        q: Number of the producer, 0 <= q < s.

    Returns:
        A contiguous, never empty range: [ceil(q*t/s), ceil((q+1)*t/s)) for s < t, one consumer for s >= t.
    """
    _check_number("producer", q, s)
    if s < t:
        return range(-(-q * t // s), -(-(q + 1) * t // s))
    # Consumer i ends before (i+1)*s/t, so that q belongs to the first i with (i+1)*s/t >= q+1.
    consumer = ((q + 1) * t - 1) // s
    return range(consumer, consumer + 1)


def _check_number(role: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise IndexError(f"There is no {role} {number}: the stage has {count} instances, counted from 0.")
