"""What `make bench` measures: speed, memory and latency on this machine, against plain Spark within the same run.

Read `__main__`, then `measures` (what a part reports) and `setting` (what all parts share); after that one module per
part: `throughput`, `checkpoints`, `ending`, `recovery`, `planning`, `memory`, `channels`.
"""
