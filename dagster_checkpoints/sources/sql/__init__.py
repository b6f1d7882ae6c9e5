"""A table of a database as a bounded source, read in splits. Read first: :mod:`table`."""
