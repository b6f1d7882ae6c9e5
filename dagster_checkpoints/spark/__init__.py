"""The data plane: stages as Spark queries, joined by channels, under the coordinator's checkpoints.

Read `job` (one execution) with `job_start`, `job_restart` and `job_end` (what it starts from, when it restarts, how it ends)
and `job_loop` (the loop around the coordinator), then `deployment` with `attempt_plans`, `restored_state` and `wiring` (from
stages and a checkpoint to plans, tasks and channels), then `task` with `source_task` and `channel_task` (the life of one
task), `operator_chain` (the calls of its stages) and `task_watermarks` (its event time). Below them: `plans` and `inputs`
(the user's functions and what they receive), `query`, `query_log` and `snapshots` (one Spark query and its checkpoint
directory), `operators` and `late_rows` (what Spark's stateful operators did in a batch), `channels`, `segments` and
`sources` (records between tasks), `uploads`, `checkpointing` and `restoring` (a checkpoint on its way to storage and back),
`spark_start`, `session` and `java`.
"""
