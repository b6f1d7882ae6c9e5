"""Deliberate faults in a restore with other numbers of instances: who gets which state, and what is on its way to whom."""

from __future__ import annotations

from dagster_checkpoints.execution import state_changes
from dagster_checkpoints.state import rescaled_instances
from dagster_checkpoints.state.instance_matches import InstanceMatches
from dagster_checkpoints.state.rescaled_channels import RescaledEdge, least_watermark, one_after_the_other
from dagster_checkpoints.state.rescaled_checkpoint import _Rescaling
from simulation.injection import Fault

RESCALING_FAULTS = (
    Fault(
        "keyed state is taken from the old instance of the same number only",
        rescaled_instances.keyed_state_shares,
        "if set(held[i]) & set(own)",
        "if i == index",
        "rescaling",
    ),
    Fault(
        "an instance of a source gets the state of its number, not of its name",
        InstanceMatches.origins,
        "before.index(name) if name in before else None for name in self._now[stage]",
        "i if i < len(before) else None for i in range(len(self._now[stage]))",
        "rescaling",
    ),
    Fault(
        "each instance of a rescaled split source reads on with its own split",
        rescaled_instances.with_shared_splits,
        "watermark=watermark)",
        "splits=old[0].splits if old else (), watermark=watermark)",
        "splits",
    ),
    Fault("a rescaled instance begins with the latest event time", least_watermark, "min(", "max(", "rescaling"),
    Fault(
        "the rows of instances that only later checkpoints had stay visible",
        rescaled_instances.with_known_instances,
        "most_instances.get(each.name, 0))",
        "0)",
        "in flight",
    ),
    Fault(
        "of a job whose checkpoints are deleted nothing is known of the instances that it has had",
        state_changes.begun,
        "{**job.most_instances, **several}",
        "{}",
    ),
    # Instances that have ended
    Fault(
        "the lists of an instance that waits for its final checkpoint are dealt out",
        rescaled_instances.dealt_out,
        'state.kind != "list" or not has_ended(task)',
        "True",
        "apart",
    ),
    Fault(
        "all instances of a stage wait for their final checkpoint if one of them had ended",
        _Rescaling._dealt_out,
        "if running else",
        "if len(running) == len(old) else",
        "apart",
    ),
    Fault(
        "the transactions of an instance that waits for its final checkpoint are forgotten",
        _Rescaling._dealt_out,
        "with_transactions(own[tail], chain.tasks.get(index), tail)",
        "with_transactions(own[tail], running.get(index), tail)",
        "apart",
    ),
    # Elements in flight
    Fault(
        "an instance gets all rows in flight of an old one, and not only those of its key groups",
        RescaledEdge._elements,
        "reader is not None and",
        "False and",
        "in flight",
    ),
    Fault(
        "the elements in flight on one channel are forgotten",
        RescaledEdge.__init__,
        "in old:\n",
        "in old[1:]:\n",
        "in flight",
    ),
    Fault(
        "the rows in flight of an instance that is gone are forgotten",
        RescaledEdge.__init__,
        "if channel.carries_records",
        "if channel.carries_records and senders.present(channel.sender) is not None",
        "in flight",
    ),
    Fault(
        "rows in flight without a key go to every instance",
        RescaledEdge._places,
        "yield self._any_place(channel), None",
        "yield from ((place, None) for place in self._names)",
        "in flight",
    ),
    Fault(
        "a new instance gets the rows in flight of a static input once for each old one",
        RescaledEdge._places,
        "if channel.reader == self._table_reader:",
        "if True:",
        "in flight",
    ),
    Fault(
        "behind rows in flight a channel has the watermark of the old one that is read",
        one_after_the_other,
        "least_time((limit, *times))",
        "times[number] if times else limit",
        "in flight",
    ),
    Fault(
        "behind rows in flight a channel is ahead of its sender",
        RescaledEdge._stream,
        "limit = least_time((known.last_watermark, begin))",
        "limit = math.inf",
        "in flight",
    ),
)
