"""One execution of a pipeline: acquiring it, deploying attempts, the loop around the coordinator, restarts, the end.

Read `job_execution`, then `job_start` and `job_driver` (which performs what `execution.job_machine` decides) with
`attempt_driver`, `requesters` and `job_reporter`, and `deployment` with `attempt_plans` (from stages and a checkpoint to plans
and tasks).
"""
