"""Deliberate faults in the plan of an attempt."""

from __future__ import annotations

from dagster_checkpoints.execution import attempt_plan
from dagster_checkpoints.execution.attempt_plan import TaskPlan
from simulation.injection import Fault

PLAN_FAULTS = (
    Fault(
        "a step back takes nothing back",
        attempt_plan.plan_attempt,
        "if restored is not None and has_later else None",
        "if False else None",
    ),
    Fault(
        "rows of an instance that has finished are not taken back",
        attempt_plan._settled,
        "chain.instances if take_back_after is not None else ()",
        "()",
        "apart",
    ),
    Fault(
        "the transactions of an instance that is gone are forgotten",
        attempt_plan._settled,
        " or each.snapshot.transactions",
        "",
        "apart",
    ),
    Fault(
        "rows of an instance that is gone are not taken back",
        attempt_plan._settled,
        "take_back_after is not None or each.snapshot.transactions",
        "each.snapshot.transactions",
        "apart",
    ),
    Fault(
        "the next checkpoint of a sink that is settled has an id that was used",
        attempt_plan.plan_attempt,
        "next_checkpoint_id=next_checkpoint_id",
        "next_checkpoint_id=1",
        "apart",
    ),
    Fault(
        "an attempt forgets that a source is to end",
        attempt_plan._task,
        " or (stage.name, stage.instances[task.index]) in ended_sources",
        "",
    ),
    Fault("a task that had finished its data processes more", TaskPlan.after_finish, '== "drain"', '== "suspend"'),
    Fault("a task forgets the transactions that it has to commit", TaskPlan.transactions, "tail.transactions if", "() if"),
    Fault(
        "a fused source begins again after a restore",
        attempt_plan._task,
        "restored=known.get(stage.name)",
        "restored=None",
        "fan-in",
    ),
    Fault(
        "tasks that go on are built again",
        attempt_plan.plan_attempt,
        "vertices is None or chain.name in vertices",
        "True",
        "regions",
    ),
)
