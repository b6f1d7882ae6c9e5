"""An Apache Iceberg table as a stream. Read first: :mod:`table`, then :mod:`history`."""
