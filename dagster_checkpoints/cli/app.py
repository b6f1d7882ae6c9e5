"""The command `dagster-checkpoints`: its sub-commands, imported when they are run, and how errors are reported."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from dagster_checkpoints.cli.exits import MEANINGS, exit_code
from dagster_checkpoints.errors import DagsterCheckpointsError

_COMMANDS = {
    # name: (module, attribute, help in one line; the help page must not import the commands)
    "list": ("listing", "list_command", "Checkpoints and savepoints in storage."),
    "show": ("show", "show", "A checkpoint or savepoint in detail, or the pipeline's progress."),
    "watch": ("watch", "watch", "The progress of the running pipeline, live."),
    "health": ("health", "health", "Whether the pipeline is healthy: an exit code for cron and probes."),
    "report": ("report", "report", "Write the page of checkpoints: history, summary, graph, time line."),
    "check": ("check", "check", "Build and check the plan of every stage, without data."),
    "graph": ("graphs", "graph", "A drawing of stages, chains, roots and finished stages."),
    "trigger": ("requests", "trigger", "Request a checkpoint of the running pipeline now."),
    "savepoint": ("requests", "savepoint", "Request a savepoint of the running pipeline."),
    "stop": ("requests", "stop", "Stop the running pipeline with a savepoint."),
    "end-source": ("requests", "end_source", "End one source of the running pipeline."),
    "requests": ("requests", "requests", "Requests to the pipeline, and the answers."),
    "verify": ("verify", "verify", "Read a whole checkpoint or savepoint: is it complete, does it fit the code?"),
    "state": ("state", "state", "What a checkpoint or savepoint holds of a stage, row by row."),
    "import": ("plain_queries", "import_command", "Take over a plain Spark query: its state becomes a savepoint."),
    "export": ("plain_queries", "export_command", "Give a stage's query back to Spark: a checkpoint directory."),
    "replay": ("replay", "replay_command", "A run's recorded trace as a readable history."),
    "dispose": ("dispose", "dispose", "Delete a savepoint."),
}


class _Commands(click.Group):
    """Imports a sub-command when it is run, and turns errors into text and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"dagster_checkpoints.cli.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), meaning) for code, meaning in MEANINGS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (DagsterCheckpointsError, KeyboardInterrupt) as error:
            code = exit_code(error)
            _report(error, ctx, int(code))
            ctx.exit(int(code))


def _report(error: BaseException, ctx: click.Context, code: int) -> None:
    from dagster_checkpoints.cli.output import JSON, write_json

    text = str(error) or "interrupted"
    if ctx.find_root().meta.get(JSON):
        document = {"error": type(error).__name__, "message": text, "exit_code": code}
        for name in ("reason", "url", "request_id"):
            if getattr(error, name, ""):
                document[name] = getattr(error, name)
        write_json(document)
    click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="dagster-checkpoints")
def app() -> None:
    """Checkpoints and savepoints of pipelines: show them, take them, stop and resume with them.

    Works from any process and machine that reaches the checkpoint storage, and uses nothing but the storage. Every command takes
    --json for programs; all but replay --pipeline; all but check and replay --storage.
    """
