"""The flights of 2013 as a code location: a pipeline of Spark stages, written as a user would write his own.

Read `flights` first (the pipeline), then `reference` (the same tables computed in one batch, to compare
with), `flights_data` (where the files come from) and `feeder` (who drops December's files while the pipeline
runs).
"""
