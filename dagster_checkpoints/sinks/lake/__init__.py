"""What sinks of lake tables have in common: rows are data files below a table's location, which one commit makes visible.

Read :mod:`sink` first (the life of an instance), then :mod:`ledger` (what the table's metadata records about the sink),
:mod:`transactions` (staged files and their commit), :mod:`placement` (what a commit adds and removes: :mod:`replaced_rows`,
:mod:`replaced_partitions`) and :mod:`timelines` (restores of older checkpoints). :mod:`table_log`, :mod:`rewritable_log` and
:mod:`fitting` are what a table format provides; below them are :mod:`columns`, :mod:`names` and :mod:`table_files`.

Must not know a table format.
"""
