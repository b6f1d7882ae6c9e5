"""The command line: `dagster-checkpoints`.

`app` is the command. Each sub-command is imported only when it is run, so that a command which needs neither Spark nor Dagster
starts without them. Shared by all of them: `exits` (exit codes), `storage_options` (storage and pipeline), `locate` (from a
user's text to a checkpoint), `output` (tables, JSON, and errors of standard output). Commands that read: `listing`,
`show`, `watch`, `graphs`, `state`, `replay`; `requests` sends requests to a running pipeline; `verify` and `dispose` are for
checkpoints and savepoints in storage; `check` is for a pipeline's code.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point of `dagster-checkpoints`."""
    try:
        from dagster_checkpoints.cli.app import app
        from dagster_checkpoints.cli.output import checked_standard_output

        with checked_standard_output():
            app(prog_name="dagster-checkpoints")
    except KeyboardInterrupt:  # while the modules above are imported, most of the time of a command; later `app` handles it
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)  # Exit.INTERRUPTED, whose module may be only half imported
