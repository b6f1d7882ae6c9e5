"""`dagster-checkpoints` itself: its sub-commands, imported when they are run, and the way errors are told."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from dagster_checkpoints.cli.exits import MEANINGS, exit_code
from dagster_checkpoints.errors import DagsterCheckpointsError

_COMMANDS = {
    # name: (module, attribute, help in one line; the listing must not import what it lists)
    "list": ("listing", "list_command", "Checkpoints and savepoints in storage."),
    "show": ("show", "show", "A checkpoint or savepoint in detail, or how the pipeline runs."),
    "watch": ("watch", "watch", "How the pipeline runs, as it runs."),
    "check": ("check", "check", "Can every stage run? Plans are built and checked, without data."),
    "graph": ("graphs", "graph", "Stages, chains, roots and what has finished, as a drawing."),
    "trigger": ("requests", "trigger", "Ask the running pipeline for a checkpoint now."),
    "savepoint": ("requests", "savepoint", "Ask the running pipeline for a savepoint."),
    "stop": ("requests", "stop", "Stop the running pipeline with a savepoint."),
    "end-source": ("requests", "end_source", "End one source of the running pipeline."),
    "requests": ("requests", "requests", "What was asked of the pipeline, and the answers."),
    "verify": ("verify", "verify", "Read all of a checkpoint or savepoint: is it whole, does it fit?"),
    "replay": ("replay", "replay_command", "A run's recorded trace as a readable history."),
    "dispose": ("dispose", "dispose", "Delete a savepoint."),
}


class _Commands(click.Group):
    """Imports a sub-command when it is asked for, and turns errors into text and an exit code."""

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
            _tell(error, ctx, int(code))
            ctx.exit(int(code))


def _tell(error: BaseException, ctx: click.Context, code: int) -> None:
    from dagster_checkpoints.cli.output import JSON, write_json

    text = str(error) or "interrupted"
    if ctx.find_root().meta.get(JSON):
        told = {"error": type(error).__name__, "message": text, "exit_code": code}
        for name in ("reason", "url", "request_id"):
            if getattr(error, name, ""):
                told[name] = getattr(error, name)
        write_json(told)
    click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="dagster-checkpoints")
def app() -> None:
    """Checkpoints and savepoints of pipelines: look at them, take them, stop and resume with them.

    Works from any process and machine that reaches the checkpoint storage; nothing but storage is asked. Every command takes
    --pipeline, and --json for programs; all but check take --storage.
    """
