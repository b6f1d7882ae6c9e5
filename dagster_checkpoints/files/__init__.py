"""A file somewhere: S3 and local directories behind one small interface. Must not know checkpoints or sinks.

Read in this order: :mod:`store` (the interface), :mod:`local` and :mod:`s3` (the two kinds), :mod:`urls` and :mod:`opening` (from
a URL to a store), :mod:`durable` (files that survive a loss of power).
"""
