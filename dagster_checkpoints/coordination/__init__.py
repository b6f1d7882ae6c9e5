"""The checkpoint protocol as pure state machines: events in, actions out; no threads, no clock, no storage.

Read `plan` (which tasks a checkpoint concerns), `checkpoints` (its values), `coordinator` (when one is triggered) and
`pending_checkpoints` (from its trigger to its end), with their events and actions in `events`: the job's side. Then the
task's side: `barriers`, `watermarks`, `lifecycle`. `progress`, `requests`, `schedule`, `failures`,
`retention` and `restarts` are the coordinator's rules, one each; `stop_with_savepoint` is a stop from its request to its answer,
`statistics` counts and measures checkpoints.
"""
