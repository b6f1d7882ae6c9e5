"""Automation: sensors that control a running pipeline, and the schedule of its savepoints.

Each `build_…` makes one for your definitions. A tick writes a request into the pipeline's storage or looks at the answer to an
earlier one; it never waits for the pipeline, and says in its skip reason what it saw. Read `ticks` first (how a tick reaches
the pipeline) and `cursors` (what it remembers); then `reroot`, `conditions` and `drain`, `end_of_input`, `recovery`,
`savepoint_schedule`, `savepoint_check`.
"""
