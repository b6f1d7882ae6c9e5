"""A running pipeline is controlled by request files in its storage and reports its progress in a status file.

Read in this order: :mod:`requests` (requests and answers as values, and their encoding), :mod:`request_box` (the files),
:mod:`pipeline_control` (the requester's side, in any process that reaches the storage) and :mod:`status` (what displays and
sensors read). The owner's side is :mod:`dagster_checkpoints.spark.job.requests`.
"""

from dagster_checkpoints.control.pipeline_control import NoRunningPipeline, PipelineControl, RequestFailed, RequestTimedOut

__all__ = ["NoRunningPipeline", "PipelineControl", "RequestFailed", "RequestTimedOut"]
