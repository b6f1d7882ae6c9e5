"""Automation: sensors that control a running pipeline, and the schedule of its savepoints.

Each `build_…` function creates one for your definitions. A tick writes a request into the pipeline's storage or reads the answer
to an earlier request; it never waits for the pipeline, and its skip reason describes what it found. Read `pipeline_sensor` first
(how a tick reaches the pipeline, and its memory between ticks); then `reroot`, `conditions` and `stops`, `end_of_input`,
`recovery`, `savepoints`.
"""
