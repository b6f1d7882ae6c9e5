"""The numbers of a running pipeline as OpenTelemetry metrics, sent to a collector from the run's process.

They are those of the status, under Flink's names where it has them, in lower case, as all names of OpenTelemetry are, and with
the attributes ``pipeline``, ``stage`` and ``instance``. Where they go, and how often, say the environment variables of
OpenTelemetry (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_METRIC_EXPORT_INTERVAL``, …). For displays and alarms: a collector that
does not answer never changes the job.

Source: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/; Flink's page "Metrics".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.errors import DagsterCheckpointsError

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics.export import MetricReader

PREFIX = "dagster_checkpoints."
_CLOSE_MILLISECONDS = 5_000
"""Time for the last export, when the run ends."""


class MetricsUnavailableError(DagsterCheckpointsError):
    """The packages that send metrics are not installed."""


class Value(NamedTuple):
    """A number, and to which stage and instance it belongs."""

    value: float
    attributes: dict[str, str]


class Metric(NamedTuple):
    """A metric: name, unit, meaning, whether it only grows, and its values in a status at a time, in seconds since 1970."""

    name: str
    unit: str
    text: str
    grows: bool
    values: Callable[[PipelineStatus, float], Iterable[Value]]


def check_metrics_available() -> None:
    """Refuse to send metrics where the packages for it are missing.

    Raises:
        MetricsUnavailableError: names the extra to install.
    """
    missing = [name for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http") if not _is_installed(name)]
    if missing:
        raise MetricsUnavailableError(
            f"metrics=True: expected the packages of the extra otel, found no {' and no '.join(missing)}. Install them: "
            "pip install 'dagster-checkpoints[otel]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


class PipelineMetrics:
    """The metrics of one run.

    Args:
        pipeline: name of the pipeline.
        run_id: id of the run.
        reader: reads the metrics; default: they are sent to the collector that the environment names.
        wall: seconds since 1970, for the lag of watermarks.

    Raises:
        MetricsUnavailableError: the packages are not installed.
    """

    def __init__(
        self, pipeline: str, run_id: str, reader: MetricReader | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        check_metrics_available()
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        self._pipeline = pipeline
        self._wall = wall
        self._status: PipelineStatus | None = None
        resource = Resource.create({"service.name": "dagster-checkpoints", "service.instance.id": run_id})
        chosen = reader if reader is not None else PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([chosen], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("dagster_checkpoints")
        for metric in METRICS:
            create: Any = meter.create_observable_counter if metric.grows else meter.create_observable_gauge
            create(PREFIX + metric.name, [self._callback(metric)], metric.unit, metric.text)

    def update(self, status: PipelineStatus) -> None:
        """The newest status; metrics are read from it until there is another one."""
        self._status = status

    def close(self) -> None:
        """Send the last values. Waits for a collector that does not answer for a few seconds at most."""
        self._provider.shutdown(timeout_millis=_CLOSE_MILLISECONDS)

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterator[Observation]]:
        from opentelemetry.metrics import Observation

        def observe(_: CallbackOptions) -> Iterator[Observation]:
            status = self._status
            for value, attributes in metric.values(status, self._wall()) if status is not None else ():
                yield Observation(value, {"pipeline": self._pipeline, **attributes})

        return observe


def _of_pipeline(value: Callable[[PipelineStatus], float | None]) -> Callable[[PipelineStatus, float], Iterable[Value]]:
    def values(status: PipelineStatus, now: float) -> Iterator[Value]:
        found = value(status)
        if found is not None:
            yield Value(found, {})

    return values


def _rows(status: PipelineStatus, now: float) -> Iterator[Value]:
    return (Value(stage.rows, {"stage": stage.name}) for stage in status.stages if stage.rows is not None)


def _late_rows(status: PipelineStatus, now: float) -> Iterator[Value]:
    return (Value(stage.late_rows, {"stage": stage.name}) for stage in status.stages)


def _watermarks(status: PipelineStatus, now: float) -> Iterator[Value]:
    for stage in status.stages:
        for instance in stage.instances:
            if instance.watermark_ms is not None and not instance.end_of_data:
                yield Value(instance.watermark_ms, {"stage": stage.name, "instance": instance.name})


def _watermark_lags(status: PipelineStatus, now: float) -> Iterator[Value]:
    return (Value(now * 1000 - watermark, attributes) for watermark, attributes in _watermarks(status, now))


def _pending_records(status: PipelineStatus, now: float) -> Iterator[Value]:
    for stage in status.stages:
        for instance in stage.instances:
            if instance.rows_behind is not None:
                yield Value(instance.rows_behind, {"stage": stage.name, "instance": instance.name})


METRICS = (
    Metric("num_restarts", "{restart}", "restarts of this run", True, _of_pipeline(lambda s: s.attempt - 1)),
    Metric(
        "total_number_of_checkpoints", "{checkpoint}", "checkpoints and savepoints that were triggered in this run", True,
        _of_pipeline(lambda s: s.checkpoints.triggered if s.checkpoints else None),
    ),
    Metric(
        "number_of_completed_checkpoints", "{checkpoint}", "completed checkpoints and savepoints of this run", True,
        _of_pipeline(lambda s: s.checkpoints.completed if s.checkpoints else None),
    ),
    Metric(
        "number_of_failed_checkpoints", "{checkpoint}", "failed checkpoints and savepoints of this run", True,
        _of_pipeline(lambda s: s.checkpoints.failed if s.checkpoints else None),
    ),
    Metric(
        "number_of_in_progress_checkpoints", "{checkpoint}", "checkpoints and savepoints under way", False,
        _of_pipeline(lambda s: len(s.pending)),
    ),
    Metric(
        "last_checkpoint_duration", "ms", "time from trigger to completion of the latest one", False,
        _of_pipeline(lambda s: s.last_checkpoint.duration * 1000 if s.last_checkpoint else None),
    ),
    Metric(
        "last_checkpoint_size", "By", "bytes uploaded for the latest one", False,
        _of_pipeline(lambda s: s.last_checkpoint.new_bytes if s.last_checkpoint else None),
    ),
    Metric(
        "last_checkpoint_full_size", "By", "bytes of all files that the latest one names", False,
        _of_pipeline(lambda s: s.last_checkpoint.total_bytes if s.last_checkpoint else None),
    ),
    Metric("num_records_out", "{record}", "rows that a stage has emitted since the job began", True, _rows),
    Metric("num_late_records_dropped", "{record}", "rows that a stage has dropped as late", True, _late_rows),
    Metric("current_output_watermark", "ms", "output watermark of an instance, since 1970", False, _watermarks),
    Metric("watermark_lag", "ms", "time by which the output watermark is behind the clock", False, _watermark_lags),
    Metric("pending_records", "{record}", "messages that a Kafka source has not read yet", False, _pending_records),
)  # fmt: skip
