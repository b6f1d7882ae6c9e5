"""A sink that writes Parquet files to a directory: :mod:`sink` is the sink, the other modules are its parts."""
