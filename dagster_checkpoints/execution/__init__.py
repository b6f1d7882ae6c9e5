"""The rules of a run as pure machines: what a job and its tasks do when something happens; events in, actions out.

No threads, no locks, no clock, no files, no Spark: the runtime (`spark`, `storage`) and the simulator drive the same machines,
perform their actions and feed the results back. Every module is imported under its own name. Read `messages` (what a job sends
to its tasks) first. Then the task's side: `elements` (what flows on a channel), `task_events` (what happens to a task, and what
it then has to do), `input_gate` with `input_channel` and `gate_snapshots` (what a task reads, and when it must not read on),
`task_machine` (in which order a task does what it has to) and `output_event_time` (what it says of event time). Then the job's
side: `job_requests` (what is asked of a running job), `job_events` and `job_machine` (attempts, restarts and the end, around the
coordinator). Then storage's side, whose procedures are steps (`storage_steps`: generators that yield requests): `pipeline_state`,
`state_changes` and `origin` (the content of `state.json`), `storage_errors`, `acquisition` and `ownership` (one owner per
pipeline, and the commit point), `start_point` (where a run starts from), `checkpoint_writing`, `checkpoint_deletion` and
`shared_files` (the order of requests).
"""
