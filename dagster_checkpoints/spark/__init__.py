"""The data plane: stages as Spark queries, joined by channels, under the coordinator's checkpoints.

In rooms, imports going downwards only: `job` (one execution: attempts, the loop, reporting), `tasks` (one instance of a chain
each), `snapshots` (a task's snapshot on its way to storage and back), `channels` (records between tasks), `session` (Spark's
session) and `query` (one Spark query: plan, checks, log). `errors` is for all of them.
"""
