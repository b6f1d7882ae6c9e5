"""What sinks of lake tables have in common: rows are data files below a table's location, which one commit makes visible.

Read :mod:`sink` first (the settings), then :mod:`target` (a commit, and staged files), :mod:`ledger` (what the table's metadata
records about the sink), :mod:`transactions` (the files of a transaction), :mod:`placement` (what a commit adds and removes,
and rows that leave the table and come back; :mod:`replaced_rows`: by key). :mod:`table_log` is what a format
provides; :mod:`fitting` makes a stage's files the table's. Below them are :mod:`columns`, :mod:`keys` and :mod:`names`.

Must not know a table format.
"""
