"""The invariants that the simulator checks, and where.

- Each record's effect is committed exactly once, at least once in that mode: `World._check_effects` when a job has finished,
  `World._check_written` when its sinks have recovered and when it is suspended; `consistency` for each checkpoint; a completed
  checkpoint's transactions exist: `Writer._check_staged`.
- No record is processed after a stop's savepoint, no split taken: `TaskData.read_record`, `TaskData._process_record`.
- A stage's events come in order: MAX_WATERMARK once (`TaskData.send_event_time`, `_pass_mark`), finish
  once (`finish_operators`), no snapshot or notice after close, no uncommitted rows at close
  (`Task._pin_snapshot`, `_commit`, `_close`); after finish no row is read or emitted (`_into`, `emit`, `_process_record`).
- No snapshot is taken for a checkpoint of whose abort the task was notified: `Task._pin_snapshot`.
- Event time never goes back, no record is late, and every watermark reaches the query: `TaskData.restore`, `check_watermark`,
  `_process_record`, `Task._run_batch`, `operators.Window`.
- Every task ends with the stop's one savepoint: `Process.task_ended`.
- A finished task never runs again: `restoring.deploy`, `Writer.recorded_metadata`.
- No file is deleted that a retained checkpoint or a user needs, or that a later owner has stored: `Store.delete`,
  `delete_shared`, `check_complete` whenever a checkpoint is relied on.
- No files are left over at the end: `World._check_nothing_left`, `Store.left_over`.
- Ids and epochs increase, and the newest never goes back: `Process._triggered`, `Store.put_state`; no task is notified of a
  checkpoint that the store has not named: `Process._send`.
- All state comes back in a restore: `restoring.deploy`, `operators.Broadcast`, `restoring._check_enumerator`.
- Every request is answered, once, however the run ends: `Process._answer`, `World.process_ended`.
- Nothing waits for ever: every job reaches its end (`running.run`); a task ends with the first checkpoint that commits behind its
  end of data (`Task._take_message`); once no faults happen any more no checkpoint and no request expires
  (`Process._check_fair`); no stop fails because a task ends by itself (`Process._answer`).
"""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant is broken: the protocol, or the simulator, is wrong."""


def check(condition: object, message: str, *values: object) -> None:
    """Raise a Violation unless the condition holds. `message` is a format for the values, if there are any."""
    if not condition:
        raise Violation(message.format(*values) if values else message)
