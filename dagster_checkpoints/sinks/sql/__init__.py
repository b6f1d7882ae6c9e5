"""A sink that writes rows to a table of a SQL database: :mod:`sink` is the sink, the other modules are its parts."""
