"""`python -m dagster_checkpoints.cli`."""

from __future__ import annotations

from dagster_checkpoints.cli import main

main()
