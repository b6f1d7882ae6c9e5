"""A sink that writes rows to an Apache Iceberg table, visible exactly once: one snapshot per instance and checkpoint.

Read :mod:`sink` first; what it shares with sinks of other lake tables is in ``sinks/lake/``. :mod:`log` is the table, its commits
and conflicts; :mod:`columns` and :mod:`data_files` are what its schema and its
manifests say.

The library ``pyiceberg`` is imported when a table is opened, not before: it is optional.
"""
