"""The interface to Dagster: asset decorator, resource, run configuration, run events, savepoints and sensors.

Read `asset_decorator` (`@pipeline_assets`), `resource` (runs a pipeline inside a Dagster run), `job_run`
(the run's main thread and the job's thread), `run_events` and `observations` (the run's reports to Dagster), then
`savepoints` (assets of savepoints) and `sensors` (automation). `dagster_checkpoints` exports the names that users import.
"""

from dagster_shared.libraries import DagsterLibraryRegistry

from dagster_checkpoints import __version__

DagsterLibraryRegistry.register("dagster-checkpoints", __version__, is_dagster_package=False)
