"""A simulator that tries to break the protocol: whole pipelines over the real state machines, with everything going wrong.

`make simulate` runs random worlds for a given time; `python -m simulation --replay SEED` shows the shortest way to what a
seed has found; `python -m simulation.faults` breaks the core on purpose and must find it.

Read `scenario` (what a seed stands for) and `shapes` (the pipelines), then `world` (what can happen) and `schedules` (who
chooses). A process is `requests` (how it performs the shipped storage steps), `machine`, `writing` and `process`; a task is
`channels`, `task_data` and `task`, with what it computes in `operators`. `storage` and `sinks` survive a crash of the process,
`restoring` and `deployment` are its start; what users ask of it is in `user_requests`.
What must hold is checked where it happens, and in `cuts` and `expected`; `shrinking` makes short what broke it.
"""
