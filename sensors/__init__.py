"""The sensors of the flights code location."""
