"""A sink that writes files (Parquet, ORC, CSV, JSON) to a directory, S3 or HDFS; readers see those of completed checkpoints.

Read :mod:`sink` first (the settings), then :mod:`target` (staged files and their commit; :mod:`directory_target` is the one whose
commits are whole directories). Below them are :mod:`open_transaction`, :mod:`part_files` (rows become files), :mod:`columns`,
:mod:`names`, and :mod:`target_files` (a file system, or S3) and :mod:`hdfs_files`.
"""
