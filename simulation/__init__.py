"""A simulator that tries to break the protocol: whole pipelines over the shipped state machines, with every kind of fault.

`make simulate` runs random worlds for a given time; `python -m simulation --replay SEED` shows the fewest steps that lead to a
seed's violation; `python -m simulation.faults` injects deliberate faults into the shipped code and must find each.

Read `scenario` (what a seed determines) and `shapes` (the pipelines), then `world` (the possible steps) and `schedules` (the
choice of steps). A process is `requests` (how it performs the shipped storage steps), `machine`, `writing` and `process`; a task
is `channels`, `task_data` and `task`, with its computation in `operators`. `storage` and `sinks` survive a crash of the process;
`restoring` starts the process and its tasks.
Invariants are checked where they could break, and in `consistency`; `running` shortens a run that breaks one.
"""
