"""The values that a seed determines: the pipeline, its settings, the faults and the users' requests."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import (
    ExponentialDelayRestart,
    FailoverStrategy,
    FailureRateRestart,
    FixedDelayRestart,
    NoRestart,
    RestartStrategy,
)
from simulation.shapes import (
    ANY,
    APART,
    ENDING,
    FAN_IN,
    IN_FLIGHT,
    REFUSED,
    REGIONS,
    SPLITS,
    STATEFUL,
    Shape,
    divided,
    random_stages,
    rescaled,
    shape_of,
)

SHAPES = 1500
"""Number of different pipelines; schedules, settings and faults differ for every seed."""


@dataclass(frozen=True)
class Scenario:
    """The parameters of a world.

    Attributes:
        seed: of the schedule.
        variants: the pipeline, and versions of it with other numbers of instances, in more chains, or both.
        idle: whether sources are idle at times.
        budgets: maximum number of each fault and of each request of users; "restart": of further runs.
        weights: of the other steps: task, mail, main, upload, io, tick, network.
        soft_limit: number of steps after which there are no more faults, and a user ends the job.
        lazy: probability that an unbounded source has no record when it could read one.
        slow: probability that a task takes no element from its channels when it could.
        apart: probability that a task other than the first instance of its stage does nothing when it could; 0 for no difference.
        patience: number of checkpoints that must complete before a user ends a job with unbounded sources.
        newest_first: whether the newest upload ends first.
        going_back: whether runs often start from another checkpoint than the newest.
        max_rows: the most rows that a micro-batch takes from the channels of its task; None for no limit.
        asynchronous: whether queries follow their gates in steps of their own, and not at once.
        failover: what restarts after a task's failure.
        bursts: whether runs are bursts, most of them.
    """

    seed: int
    variants: tuple[Shape, ...]
    config: CheckpointConfig
    restart: RestartStrategy
    idle: bool
    budgets: Counter[str]
    weights: tuple[float, ...]
    soft_limit: int
    lazy: float
    slow: float
    apart: float
    patience: int
    newest_first: bool
    going_back: bool
    max_rows: int | None
    asynchronous: bool
    failover: FailoverStrategy
    bursts: bool

    @property
    def exactly_once(self) -> bool:
        return self.config.mode == "exactly_once"


def random_scenario(seed: int, theme: str = "") -> Scenario:
    """The scenario of a seed, of the given theme; of a random one by default."""
    r = random.Random(seed)
    chosen = r.choices(list(THEMES), [often for often, _ in THEMES.values()])[0]
    theme = theme or ("refused" if seed % 29 == 26 else chosen)
    stateful = theme == "rescaling" or (theme == "tasks" and r.random() < 0.5)
    family = STATEFUL if stateful else _FAMILIES.get(theme, ANY)
    stages = random_stages(seed % SHAPES, family)
    kinds = {stage.kind for stage in stages}
    repeatable = kinds.isdisjoint(("window", "totals", "union"))
    barriers = r.choices(("aligned", "unaligned", "timeout", "at_least_once"), (6, 2, 2, 3 if repeatable else 0))[0]
    if theme == "in flight" and barriers in ("aligned", "at_least_once"):
        barriers = ("unaligned", "timeout")[seed % 2]
    idle = "window" not in kinds and r.random() < 0.3
    config, restart, timeout = _config(r, theme), _restart(r), r.choice((0.0, 1.0, 3.0))
    if barriers == "at_least_once":
        config = replace(config, mode="at_least_once")
    elif barriers != "aligned":
        aligned = timeout if barriers == "timeout" else None
        config = replace(config, unaligned=True, aligned_checkpoint_timeout=aligned, max_concurrent=1)
    if not config.checkpoints_after_tasks_finish:
        config = replace(config, tolerable_failed_checkpoints=1000)  # as without faults: a restart repeats what tasks committed
    if config.interval is not None:
        config = replace(config, interval_during_backlog=(None, None, 0.0, 10.0 * config.interval)[seed // 7 % 4])
    budgets = _budgets(r, theme, config)
    if "union" in kinds:
        budgets["lose"] = 0  # all instances of a stage with union list state must finish with the same checkpoint
        if not config.checkpoints_after_tasks_finish:
            budgets["checkpoint"] = 0  # declined, and too many declines fail a job that could not start again
    budgets["state"] = int(seed % 6 == 5 and config.checkpoints_after_tasks_finish)
    tasks = sum(stage.instances for stage in stages)
    weights = tuple(base * r.choice((0.3, 1.0, 1.0, 3.0)) for base in (10.0, 4.0, 4.0, 2.0, 2.0, 3.0 / (tasks + 1), 3.0))
    shape = shape_of(stages, chaining=seed // SHAPES % 4 != 3)
    other = rescaled(shape, seed) if theme in ("rescaling", "splits", "in flight") else None
    if theme == "in flight" and seed % 5 == 4:
        other = divided(shape, seed) or other
    if theme == "apart":
        tries = (rescaled(shape, seed + number, same_sources=0.9) for number in range(8))
        other = next((found for found in tries if found is not None), None)
    if theme == "rescaling":
        other = (divided(shape, seed) if seed % 3 == 0 else None) or other or divided(shape, seed)
    if theme == "fan-in" and seed % 2:
        other = divided(shape, seed)
    no_periodic = config.interval is None or not config.checkpoints_after_tasks_finish
    return Scenario(
        seed,
        (shape,) if other is None else (shape, other),
        config,
        restart,
        idle,
        budgets,
        weights,
        soft_limit=(60 + 10 * tasks) * (1 + (theme == "going back") + 3 * (theme in ("apart", "in flight"))),
        lazy=r.choice((0.0, 0.7, 0.95)) if theme != "rescaling" else 0.95,
        slow=0.9 if theme == "in flight" else 0.0,
        apart=r.choice((0.9, 0.98)) if theme == "apart" else 0.0,
        patience=0 if no_periodic else r.choice((0, 0, 1, 2)),
        newest_first=r.random() < 0.3,
        going_back=theme == "going back",
        max_rows=(None, None, None, 1, 2, 7)[seed // 11 % 6],
        asynchronous=r.random() < (0.6 if config.unaligned else 0.2),
        failover="full" if r.random() < 0.15 else "region",
        bursts=seed // 3 % 4 == 1 and config.checkpoints_after_tasks_finish,
    )


def _config(r: random.Random, theme: str) -> CheckpointConfig:
    interval = r.choices((None, 1.0, 3.0, 8.0, 40.0), (1, 3, 6, 4, 2))[0]
    timeout, min_pause = r.choice((10.0, 40.0, 1000.0)), r.choice((0.0, 0.0, 2.0))
    return CheckpointConfig(
        interval=interval,
        timeout=timeout,
        min_pause=min_pause if interval is not None else 0.0,
        max_concurrent=r.choice((1, 2, 3, 3) if theme == "storage" else (1, 1, 2, 3)),
        tolerable_failed_checkpoints=r.choice((0, 1, 30, 30)),
        retained=r.choice((1, 1, 2, 3)),
        checkpoints_after_tasks_finish=r.random() < 0.93 or theme == "apart",
        initial_delay=r.choice((None, None, 0.0)) if interval is not None else r.choice((None, None, None)),
        max_queued=r.choice((1, 3, 1000)),
        keep_on_finish=r.random() < 0.1,
        history=0,
    )


def _restart(r: random.Random) -> RestartStrategy:
    made: tuple[RestartStrategy, ...] = (
        FixedDelayRestart(r.choice((1, 5)), r.choice((0.0, 2.0))),
        FixedDelayRestart(100, 0.0),
        NoRestart(),
        ExponentialDelayRestart(0.5, 4.0, 2.0, 100.0, None),
        FailureRateRestart(3, 20.0, 1.0),
    )
    return r.choices(made, (3, 6, 1, 2, 1))[0]


THEMES: dict[str, tuple[int, str]] = {
    "quiet": (2, ""),
    "tasks": (
        5,
        "task:012 upload:012 decline:01 commit:01 finish:01 snapshot:01 checkpoint:01 savepoint:01 drain:001 restart:01 "
        "repeat:012 lose:0012 end_all:0001",
    ),
    "storage": (4, "write:468 checkpoint:234 savepoint:01 suspend:01 upload:01 task:01 crash:01 restart:1 repeat:012"),
    "owners": (5, "crash:012 pause:012 write:001 restart:23 checkpoint:01 savepoint:01 suspend:001 task:001 cancel:001"),
    "stops": (
        5,
        "suspend:012 drain:01 savepoint:01 decline:01 upload:01 commit:001 task:001 snapshot:001 end_source:01 restart:12 "
        "repeat:001 lose:001 end_all:001",
    ),
    "ends": (5, "task:12 crash:01 commit:01 lose:12 checkpoint:123 end_source:12 restart:12"),
    "going back": (6, "pause:123 crash:01 upload:012 decline:012 checkpoint:123 savepoint:012 suspend:01 task:001 restart:234"),
    "fan-in": (
        5,
        "task:012 crash:01 upload:01 decline:01 commit:001 snapshot:001 checkpoint:0123 savepoint:01 suspend:01 drain:01 "
        "end_source:012 restart:123 lose:01",
    ),
    "splits": (3, "task:012 crash:012 upload:01 suspend:012 savepoint:01 end_source:01 checkpoint:0123 restart:345"),
    "regions": (
        5,
        "task:123 upload:012 decline:01 commit:01 finish:01 snapshot:01 checkpoint:012 savepoint:01 suspend:01 drain:001 "
        "write:024 end_source:01 crash:001 restart:12 repeat:012 lose:01",
    ),
    "rescaling": (5, "suspend:12 savepoint:12 crash:01 task:001 end_source:01 checkpoint:012 restart:345"),
    "apart": (4, "checkpoint:567 crash:456 savepoint:01 suspend:01 task:01 end_source:12 lose:12 restart:789"),
    "in flight": (4, "checkpoint:456 crash:456 suspend:001 task:001 end_source:01 restart:789"),
    "refused": (
        0,
        "task:012 crash:012 upload:01 decline:012 commit:01 finish:01 snapshot:01 checkpoint:123 savepoint:01 suspend:01 "
        "drain:01 end_source:01 restart:234 repeat:012 lose:01",
    ),
}
"""By theme: its weight, and the possible budgets of each fault and request, one digit each.

Related faults together find more than a few of every kind.
"""
_FAMILIES = {
    "apart": APART,
    "ends": ENDING,
    "fan-in": FAN_IN,
    "in flight": IN_FLIGHT,
    "refused": REFUSED,
    "regions": REGIONS,
    "splits": SPLITS,
}
_BUDGETS = {theme: [part.split(":") for part in budgets.split()] for theme, (_, budgets) in THEMES.items()}


def _budgets(r: random.Random, theme: str, config: CheckpointConfig) -> Counter[str]:
    budgets = Counter({what: int(r.choice(numbers)) for what, numbers in _BUDGETS[theme]})
    budgets["end_source"] += r.random() < 0.15
    if not config.checkpoints_after_tasks_finish:
        # Tasks commit at their own end: a crash may repeat rows then.
        return Counter({what: budgets[what] for what in ("checkpoint", "savepoint", "end_source", "end_all")})
    return budgets
