"""A Delta Lake table as a stream. Read first: :mod:`table`, then :mod:`history`."""
