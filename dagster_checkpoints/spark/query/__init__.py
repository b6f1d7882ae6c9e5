"""One Spark query: the plan from the user's functions, checks of that plan, and the query's own log.

Read `plans` and `stage_inputs` (the user's functions and what they receive), `query` and `query_log`.
"""
