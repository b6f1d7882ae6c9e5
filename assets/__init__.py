"""The flights of 2013 as a code location: a pipeline of Spark stages, written as by a user of the plugin.

Read `flights` first (the pipeline), then `flights_data` (its input files), `flights_sinks` (where it commits its tables),
`feeder` (writes December's files while the pipeline runs) and `reference` (computes the same tables in one batch, to compare).
"""
