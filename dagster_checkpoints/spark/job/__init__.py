"""One execution of a pipeline: acquiring it, deploying attempts, the loop around the coordinator, restarts, the end.

Read `job_execution`, then `job_start`, `job_restart` and `job_end`, `job_loop`, and `deployment` with `attempt_plans` (from
stages and a checkpoint to plans and tasks).
"""
