"""The search of `test_sink_histories.py` with many more histories of each sink."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.sinks.test_sink_histories import DeltaHistories, DeltaKeyHistories, Histories, IcebergHistories


def examples(number: int) -> settings:
    return settings(max_examples=number, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


class ManyHistories(Histories):
    pass


class ManyDeltaHistories(DeltaHistories):
    pass


class ManyDeltaKeyHistories(DeltaKeyHistories):
    pass


class ManyIcebergHistories(IcebergHistories):
    pass


TestManyHistories = ManyHistories.TestCase
TestManyHistories.settings = examples(400)
TestManyDeltaHistories = ManyDeltaHistories.TestCase
TestManyDeltaHistories.settings = examples(40)
TestManyDeltaKeyHistories = ManyDeltaKeyHistories.TestCase
TestManyDeltaKeyHistories.settings = examples(40)
TestManyIcebergHistories = ManyIcebergHistories.TestCase
TestManyIcebergHistories.settings = examples(20)
