"""Savepoints in Dagster: an asset per pipeline, whose partitions are the savepoints, and its asset check.

Read `asset` (its materialization takes a savepoint), `recording` (records savepoints that were taken in other ways), `metadata`
(what Dagster shows of a savepoint), `retention` (which savepoints of a schedule are kept) and `check`.
"""
