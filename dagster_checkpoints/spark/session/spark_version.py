"""The version of Spark that is installed, and whether the plugin runs on it."""

from __future__ import annotations

from typing import ClassVar

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.state.spark_versions import SUPPORTED_SPARK_TEXT, is_supported_spark


class SparkVersionError(DagsterCheckpointsError):
    """Spark has a version that the plugin does not run on."""

    repeats: ClassVar[bool] = True


def installed_version() -> str:
    """The version of the PySpark that this process imports, such as `4.3.0`."""
    from pyspark.version import __version__

    return str(__version__)


def check_supported(version: str) -> None:
    """Check that the plugin runs on a version of Spark.

    Args:
        version: The version of PySpark, or of the Spark that a session runs on.

    Raises:
        SparkVersionError: It does not.
    """
    if not is_supported_spark(version):
        raise SparkVersionError(
            f"expected {SUPPORTED_SPARK_TEXT}, found Spark {version}. The plugin reads and writes Spark's checkpoint files, and "
            "their layout depends on the version. Install another one: pip install 'pyspark>=4.1,<4.4'; or, if SPARK_HOME names "
            "a Spark of another version than PySpark, unset it. Nothing was started"
        )
