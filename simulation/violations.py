"""What a run of the simulator can find, and where.

- Each record's effect is committed exactly once, at least once in that mode: `World._check_effects` when a job has finished,
  `World._check_written` when its sinks have recovered and when it is suspended; `cuts` for each checkpoint; what its sinks have
  pre-committed is there when it is complete: `Writer._check_staged`.
- No record is processed after a stop's savepoint, no split taken: `TaskData.read_record`, `TaskData._take`.
- A stage's events come in order: MAX_WATERMARK once (`TaskData._advance_operators`, `say`, `_come_past`), end_input once per
  input and finish (`finish_operators`), no snapshot or notice after close, nothing uncommitted at it (`Task._pin_snapshot`,
  `_commit`, `_close`); after finish no row comes in or goes out (`_into`, `emit`, `_take`).
- No snapshot is taken for a checkpoint of whose abort the task was told: `Task._pin_snapshot`.
- Event time never goes back, nothing is late, and every watermark is told: `TaskData.restore`, `check_watermark`, `_take`,
  `Task._run_batch`, `operators.Window`.
- Every task ends with the stop's one savepoint: `Process.task_ended`.
- What has finished never runs again: `deployment.deploy`, `Writer.built`.
- Nothing is deleted that a retained checkpoint, or a user, names, or a later owner has stored: `Store.delete`,
  `delete_shared`, `check_whole` whenever a checkpoint is relied upon.
- Nothing is left over at the end: `World._check_nothing_left`, `Store.left_over`.
- Ids and epochs increase, and the newest never goes back: `Process._triggered`, `Store.put_state`; no task is told of a
  checkpoint that the store has not named: `Process._check_named`.
- All state comes back in a restore: `deployment._check_unions`, `operators.Broadcast`, `restoring._with_enumerator`.
- Every request is answered, once: `UserRequest.answer`, `World._check_finished`.
- Every job reaches its end: `running.run`.
"""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold: the protocol, or the simulator's runtime, is wrong."""


def check(condition: object, said: str, *values: object) -> None:
    """Raise a Violation unless the condition holds. `said` is a format for the values, if there are any."""
    if not condition:
        raise Violation(said.format(*values) if values else said)
