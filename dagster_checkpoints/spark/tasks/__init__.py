"""Tasks: one instance of a chain each, on a thread of its own, with a mailbox and one Spark query at most.

Read `task` with `source_task` and `channel_task`, then `operator_chain` (the calls of its stages), `task_watermarks` (its event
time) and `task_sink`.
"""
