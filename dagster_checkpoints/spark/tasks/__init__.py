"""Tasks: each runs one instance of a chain on its own thread, with a mailbox and one Spark query at most.

Read `task` with `source_task` and `channel_task`, then `operator_chain` (the calls of its stages), `query_runs`,
`task_watermarks` (its event time), `task_snapshots` and `task_sink`.
"""
