"""The plugin as Dagster sees it: asset decorator, resource, run configuration, run events, savepoints and sensors.

Read `asset_decorator` (what a user decorates), `resource` (what runs a pipeline inside a Dagster run), `job_run` and
`job_thread` (the run's main thread and the thread of the job), `run_events` and `observations` (what the run reports), then
`savepoints` (assets of savepoints) and `sensors` (automation). What a user imports is exported by `dagster_checkpoints`.
"""
