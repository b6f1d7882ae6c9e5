"""The rules of a run as pure state machines of the job and its tasks; events in, actions out.

No threads, no locks, no clock, no files, no Spark: the runtime (`spark`, `storage`) and the simulator drive the same machines,
perform their actions and feed the results back. Every module is imported under its own name. Read the task's side first:
`elements` (the content of a channel), `task_events` (what a job sends to it, its events and actions), `input_gate` with
`input_channel`, `gate_intake` and `gate_snapshots` (how far a task reads), `event_time` (of its inputs and outputs) and
`task_machine` (the order of a task's actions). Then the job's side: `job_requests` (the requests to a running job), `job_events`
with `job_storage` (what storage's answers mean to a job), `job_actions` and `job_phases`, `attempt_plan` (what an attempt runs),
and `job_machine` with `job_coordination` (attempts, restarts and the end, around the coordinator). Then storage's side, whose
procedures are steps (`storage_steps`: generators that yield requests): `pipeline_state` and `state_changes` (the content of
`state.json`), `acquisition` and `ownership` (one owner per pipeline, and the commit point), `start_point` (where a run starts
from), `checkpoint_writing`, `checkpoint_deletion` and `shared_files` (the order of requests). `trace` records and replays
machines.
"""
