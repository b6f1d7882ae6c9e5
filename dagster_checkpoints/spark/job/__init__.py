"""One execution of a pipeline: acquisition, deployment of attempts, the loop around the job machine, restarts, the end.

Read `job_execution`, then `runtime` (what all of the following share), `job_start` and `job_driver` (which performs what
`execution.job_machine` decides) with `attempt_driver`, `requests` and `job_reporter`, and `deployment` with `query_plans`
(from stages and a checkpoint to plans and tasks).
"""
