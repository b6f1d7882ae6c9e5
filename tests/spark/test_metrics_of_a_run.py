"""A collector receives the numbers of a real run."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from dagster_checkpoints.control.metrics import PREFIX
from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage

ROWS = "k string, ts timestamp, v long"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ExportMetricsServiceRequest]]:
    """A collector that the environment names, and what it has received."""
    received: list[ExportMetricsServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            received.append(ExportMetricsServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield received
    server.shutdown()
    server.server_close()


def test_a_collector_has_the_last_numbers_of_a_run_when_it_has_ended(
    lab: Any, collector: list[ExportMetricsServiceRequest]
) -> None:
    @bounded_source()
    def history(context):
        return lab.stream("history", ROWS)

    @stage(sink=lab.sink())
    def even(history):
        return history.where("v % 2 = 0")

    lab.put("history", ROWS, [("a", lab.at(number), number) for number in range(10)])
    job = lab.start(Pipeline("numbers", [history, even]), metrics=True)
    job.finished()
    [exported] = collector[-1].resource_metrics
    resource = {each.key: each.value.string_value for each in exported.resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("dagster-checkpoints", job.execution.run_id)
    [scope] = exported.scope_metrics
    values = {each.name.removeprefix(PREFIX): each for each in scope.metrics}
    assert all(each.name.startswith(PREFIX) for each in scope.metrics)
    emitted = values["num_records_out"].sum
    assert emitted.is_monotonic
    rows = {({each.key: each.value.string_value for each in p.attributes}["stage"]): p.as_int for p in emitted.data_points}
    assert rows == {"history": 10, "even": 5}
    assert [point.as_int for point in values["number_of_completed_checkpoints"].sum.data_points] == [len(job.checkpoints())]
    assert [point.as_double > 0 for point in values["last_checkpoint_duration"].gauge.data_points] == [True]
