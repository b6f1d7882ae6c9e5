"""One Spark query: its plan, built from the user's functions, the checks of that plan, and Spark's log of the query.

Read `plans` and `stage_inputs` (the user's functions and their inputs), then `query` and `query_log`.
"""
