"""What tables of data files with versions have in common when they are read as a stream. Read first: :mod:`positions`."""
