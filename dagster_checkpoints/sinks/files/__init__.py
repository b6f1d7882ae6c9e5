"""A sink that writes files (Parquet, ORC, CSV, JSON) to a directory, S3 or HDFS; readers see those of completed checkpoints.

Read :mod:`sink` first (the life of an instance), then :mod:`instance`, :mod:`transactions` (staged files and their commit) and
:mod:`restores` (restores of older checkpoints). Below them are :mod:`open_transaction`, :mod:`part_files`, :mod:`encoders` and
:mod:`text_lines` (rows become files), :mod:`columns` and :mod:`partitions`, :mod:`names` and :mod:`records`, and
:mod:`target_files` (a file system, or S3) and :mod:`hdfs_files`.
"""

from dagster_checkpoints.sinks.files.sink import FileSink

__all__ = ["FileSink"]
