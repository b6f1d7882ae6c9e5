"""Tests that an author runs against his own sink.

:class:`SinkConformance` is the suite. It needs pytest and no Spark session.
"""

import sys

if "pytest" in sys.modules:  # a failed assertion of the suite shows its values
    sys.modules["pytest"].register_assert_rewrite("dagster_checkpoints.testing.conformance")

from dagster_checkpoints.testing.conformance import SinkConformance

__all__ = ["SinkConformance"]
