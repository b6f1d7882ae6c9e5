"""The rules of a run as pure machines: what a job and its tasks do when something happens; events in, actions out.

No threads, no locks, no clock, no files, no Spark: the runtime (`spark`, `storage`) and the simulator drive the same machines,
perform their actions and feed the results back. Every module is imported under its own name. Read `messages` (what a job sends
to its tasks) first. Then the task's side: `elements` (what flows on a channel), `input_gate` (what a task reads, and when it
must not read on) and `task_machine` (in which order a task does what it has to). Then the job's side: `job_requests` (what is
asked of a running job), `job_events` and `job_machine` (attempts, restarts and the end, around the coordinator).
"""
