"""The command line: `dagster-checkpoints`.

`app` is the command with its sub-commands, each in a module of its own that is imported only when it is run: what needs
neither Spark nor Dagster starts without them. `exits` says which exit code means what, `where` finds storage and pipeline,
`output` writes tables and JSON. The commands: `listing`, `showing`, `watching`, `graphs` look; `asking` asks a running
pipeline; `verifying` and `disposing` are for savepoints at rest.
"""

from __future__ import annotations


def main() -> None:
    """The entry point of `dagster-checkpoints`."""
    from dagster_checkpoints.cli.app import app

    app(prog_name="dagster-checkpoints")
