"""A sink that writes rows to a Delta Lake table, visible exactly once: one Delta commit per instance and checkpoint.

Read :mod:`sink` first; what it shares with sinks of other lake tables is in ``sinks/lake/``. :mod:`log` is the table, its commits
and conflicts; :mod:`columns` and :mod:`data_files` are what its schema and its
log say.

The library ``deltalake`` is imported when a table is opened, not before: it is optional.
"""
