"""What `make bench` measures: speed, memory and latency on this machine, against plain Spark within the same run.

Read `__main__`, then `measures` (the results of a part) and `environment` (shared by all parts); after that one module per
part: `throughput`, `checkpoints`, `job_end`, `recovery`, `planning`, `memory`, `channels`.
"""
