"""What a streaming source must not do, or should do, under checkpoints that span the whole pipeline.

Source: https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html#input-sources
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

from dagster_checkpoints.spark.errors import SourceActsOnCommitError
from dagster_checkpoints.spark.plans import StageCall, nodes

_FILE_LIMITS = ("maxfilespertrigger", "maxbytespertrigger")


def check_source(call: StageCall, frame: DataFrame) -> None:
    """Refuse a file source that cleans up behind itself, warn of one that reads everything at once.

    Raises:
        SourceActsOnCommitError: `cleanSource` deletes or moves files when Spark commits a batch, which is before our
            checkpoint completes: after a restore they would be missing.
    """
    for node in nodes(frame._jdf.queryExecution().analyzed()):
        if node.nodeName() != "StreamingRelation":
            continue
        options = _options(node)
        where = f"{node.sourceName()} in {call.stage.location}"
        if options.get("cleansource", "off").lower() != "off":
            raise SourceActsOnCommitError(
                call.stage.name,
                call.context.instance,
                f"expected a source that leaves its files where they are, found cleanSource={options['cleansource']!r} at "
                f"{where}: Spark would remove them before the checkpoint that covers them is complete, and a restore could "
                "not read them again. Remove the option; clean up after the pipeline's checkpoints.",
            )
        if not any(limit in options for limit in _FILE_LIMITS):
            call.context.log.warning(
                "Stage %r (instance %r): %s has neither maxFilesPerTrigger nor maxBytesPerTrigger: all files that are there "
                "become one micro-batch, and no checkpoint can complete while it runs.",
                call.stage.name,
                call.context.instance,
                where,
            )


def _options(node: Any) -> dict[str, str]:
    options = node.dataSource().options()
    keys = options.keysIterator()
    found = {}
    while keys.hasNext():
        key = keys.next()
        found[str(key).lower()] = str(options.apply(key))
    return found
