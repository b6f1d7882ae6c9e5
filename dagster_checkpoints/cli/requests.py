"""`trigger`, `savepoint`, `stop`, `end-source`, `requests`: control of the running pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from time import monotonic, sleep
from typing import Any

import click

from dagster_checkpoints.cli.exits import Exit, UsageProblem
from dagster_checkpoints.cli.output import (
    console,
    facts,
    moment_in_words,
    row,
    seconds_in_words,
    table,
    write,
    write_json,
)
from dagster_checkpoints.cli.storage_options import Where, asked_by, storage_options
from dagster_checkpoints.control import NO_RUNNING_PIPELINE, Answer, ControlRequest, PipelineControl, RequestHandle
from dagster_checkpoints.storage import CheckpointStorage, StorageError

_GRACE_SECONDS = 15.0  # the owner counts its deadline from when it finds the request
_STATUS_SECONDS = 2.0
_WAITING = "dagster_checkpoints.cli.waiting"


@dataclass(frozen=True)
class Asking:
    """How a request is asked, whatever it is for."""

    deadline: float
    wait: bool
    request_id: str | None


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that asks; the command gets them as `asking`, an :class:`Asking`."""

    @wraps(command)
    def called(deadline: float, wait: bool, request_id: str | None, **others: Any) -> Any:
        return command(asking=Asking(deadline, wait, request_id), **others)

    for option in reversed(_REQUEST_OPTIONS):
        called = option(called)
    return called


_REQUEST_OPTIONS = (
    click.option(
        "--deadline",
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        metavar="SECONDS",
        show_default=True,
        help="How long the pipeline may try.",
    ),
    click.option("--wait/--no-wait", default=True, help="Wait for the answer, or only ask.", show_default=True),
    click.option(
        "--request-id",
        metavar="ID",
        help="Ask under this id. The same id again asks only once, and gets the same answer.",
    ),
)
_target = click.option(
    "--target", metavar="DIR", help="Where the savepoint is made: a URL or a directory. Default: the pipeline's own savepoints."
)
_name = click.option("--name", metavar="NAME", help="Part of the savepoint's directory's name.")


@click.command()
@request_options
@storage_options
def trigger(where: Where, asking: Asking) -> None:
    """Ask the running pipeline for a checkpoint now, between the periodic ones."""
    with _control(where) as control:
        handle = control.checkpoint(request_id=asking.request_id, deadline=asking.deadline)
        _follow(where, control, handle, asking)


@click.command()
@_target
@_name
@request_options
@storage_options
def savepoint(where: Where, asking: Asking, target: str | None, name: str | None) -> None:
    """Ask the running pipeline for a savepoint; it runs on.

    A savepoint is self-contained: it may be copied, moved and kept, and is deleted only by `dispose`.
    """
    with _control(where) as control:
        handle = control.savepoint(
            target=_absolute(target), name=name or "", request_id=asking.request_id, deadline=asking.deadline
        )
        _follow(where, control, handle, asking)


@click.command()
@click.option(
    "--drain", is_flag=True, help="End all sources first, so that every window comes out. A drained pipeline is not resumed."
)
@_target
@_name
@request_options
@storage_options
def stop(where: Where, asking: Asking, drain: bool, target: str | None, name: str | None) -> None:
    """Stop the running pipeline with a savepoint: everything before it is committed, nothing after it is processed.

    By default the pipeline is suspended, and its next run resumes from that savepoint. If the savepoint fails, a suspended
    pipeline runs on; one that was to be drained restarts from its latest checkpoint.
    """
    with _control(where) as control:
        handle = control.stop(
            drain=drain,
            target=_absolute(target),
            name=name or "",
            request_id=asking.request_id,
            deadline=asking.deadline,
        )
        _follow(where, control, handle, asking)


@click.command("end-source")
@click.argument("stage")
@click.option("--instance", metavar="NAME", help="Only this instance of it. Default: all.")
@request_options
@storage_options
def end_source(where: Where, asking: Asking, stage: str, instance: str | None) -> None:
    """End the source STAGE as if its input were exhausted: what depends on it alone finishes as well."""
    with _control(where) as control:
        handle = control.end_source(stage, instance, request_id=asking.request_id, deadline=asking.deadline)
        _follow(where, control, handle, asking)


@click.command()
@click.argument("request_id", required=False)
@click.option("--wait", is_flag=True, help="Wait for the answer to REQUEST_ID.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    metavar="SECONDS",
    show_default=True,
    help="How long to wait.",
)
@storage_options
def requests(where: Where, request_id: str | None, wait: bool, timeout: float) -> None:
    """What was asked of the pipeline and not long ago answered, newest first; or one of it."""
    if request_id is None and wait:
        raise UsageProblem("--wait needs a REQUEST_ID to wait for")
    with where.open() as storage:
        where.state(storage)
        control = PipelineControl(storage, asked_by=asked_by(), sleep=_sleep)
        if request_id is not None:
            _follow(where, control, control.handle(request_id), Asking(timeout, wait, request_id), asked=False)
        else:
            _list(where, storage, control)


# Asking


@contextmanager
def _control(where: Where) -> Iterator[PipelineControl]:
    with where.open() as storage:
        where.state(storage)
        yield PipelineControl(storage, asked_by=asked_by(), sleep=_sleep)


def _sleep(seconds: float) -> None:
    """Between two looks at the answer: says what the pipeline is doing meanwhile."""
    waiting = click.get_current_context().meta.get(_WAITING)
    if waiting is not None:
        waiting()
    sleep(seconds)


def _absolute(target: str | None) -> str:
    """A relative path is meant relative to where the user is; the pipeline may be elsewhere."""
    if not target or "://" in target:
        return target or ""
    return os.path.abspath(os.path.expanduser(target))


def _follow(where: Where, control: PipelineControl, handle: RequestHandle, asking: Asking, *, asked: bool = True) -> None:
    if not asking.wait:
        _tell(where, handle.request, handle.poll())
        return
    timeout = asking.deadline + (_GRACE_SECONDS if asked else 0.0)
    try:
        with _meanwhile(where, control, handle):
            answer = handle.wait(timeout)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; the request stands. To see its answer: dagster-checkpoints requests {handle.request_id}"
        ) from None
    _tell(where, handle.request, answer)


@contextmanager
def _meanwhile(where: Where, control: PipelineControl, handle: RequestHandle) -> Iterator[None]:
    """Show on a terminal that, and for what, we wait."""
    out = console(error=True)
    if where.as_json or not out.is_terminal:
        yield
        return
    subject = f"{_wish(handle.request)}, request {handle.request_id}"
    looked = monotonic() - _STATUS_SECONDS
    context = click.get_current_context()
    with out.status(f"Waiting for {subject}") as spinner:

        def look() -> None:
            nonlocal looked
            if monotonic() - looked >= _STATUS_SECONDS:
                looked = monotonic()
                spinner.update(f"Waiting for {subject}{_progress(control)}")

        context.meta[_WAITING] = look
        try:
            yield
        finally:
            context.meta.pop(_WAITING, None)


def _progress(control: PipelineControl) -> str:
    try:
        status = control.status()
    except StorageError:  # for display only
        return ""
    if status is None:
        return ""
    doing = [f"{p.kind} {p.checkpoint_id}: {p.acknowledged} of {p.expected} tasks" for p in status.pending]
    if status.phase != "running":
        doing.insert(0, status.phase)
    return f" ({'; '.join(doing)})" if doing else ""


# Telling


def _wish(request: ControlRequest) -> str:
    match request.kind:
        case "checkpoint":
            return "a checkpoint"
        case "savepoint":
            return "a savepoint"
        case "stop":
            return "a stop with drain" if request.drain else "a stop (suspend)"
        case "end_source":
            return f"the end of source {request.stage}" + (f"[{request.instance}]" if request.instance is not None else "")


def _tell(where: Where, request: ControlRequest, answer: Answer | None) -> None:
    if where.as_json:
        write_json({"request": request, "answer": answer, "status": answer.status if answer else "asked"})
    else:
        write(*_in_words(request, answer))
    if answer is not None and answer.status == "failed":
        code = Exit.NOT_RUNNING if answer.reason == NO_RUNNING_PIPELINE else Exit.FAILED
        click.get_current_context().exit(int(code))


def _in_words(request: ControlRequest, answer: Answer | None) -> list[Any]:
    from rich.text import Text

    if answer is None or not answer.final:
        state = "accepted" if answer is not None else "asked for"
        return [
            Text(f"{_wish(request).capitalize()} is {state}: request {request.request_id}"),
            Text(f"To see its answer: dagster-checkpoints requests {request.request_id}", style="dim"),
        ]
    if answer.status == "failed":
        return [Text(f"{_wish(request).capitalize()} failed: {answer.reason}: {answer.message}", style="red")]
    took = seconds_in_words((answer.answered_at - request.asked_at).total_seconds())
    about = facts(
        ("location", answer.location),
        ("url", answer.url if answer.url != answer.location else ""),
        ("request", f"{request.request_id}, answered after {took}"),
        *((name, str(value)) for name, value in answer.details.items() if isinstance(value, str | int | float)),
    )
    return [Text(_done(request, answer), style="bold"), about, *([Text(answer.message)] if answer.message else [])]


def _done(request: ControlRequest, answer: Answer) -> str:
    number = "" if answer.checkpoint_id is None else f" {answer.checkpoint_id}"
    match request.kind:
        case "checkpoint":
            return f"Checkpoint{number} is complete"
        case "savepoint":
            return f"Savepoint{number} is complete; the pipeline runs on"
        case "stop" if request.drain:
            return f"Drained with savepoint{number}; the next run is a new start"
        case "stop":
            return f"Suspended with savepoint{number}; the next run resumes from it"
        case _:
            return f"{_wish(request).capitalize()} has come"


def _list(where: Where, storage: CheckpointStorage, control: PipelineControl) -> None:
    found = []
    for info in storage.store.list(storage.layout.requests):
        file = storage.layout.parse_request(info.key)
        if file is None or file.part != "request":
            continue
        try:
            request = control.box.read_request(file.request_id)
            answer = control.box.read_answer(file.request_id)
        except StorageError as error:
            click.echo(f"{file.request_id}: {error}", err=True)
            continue
        if request is not None:
            found.append((request, answer))
    found.sort(key=lambda one: one[0].asked_at, reverse=True)
    if where.as_json:
        write_json([{"request": request, "answer": answer} for request, answer in found])
        return
    made = table("request", "asked (UTC)", "for", "by", "answer", keep=("asked (UTC)",))
    for request, answer in found:
        said = "none yet" if answer is None else f"{answer.status} {answer.location or answer.reason}".strip()
        asker = request.asked_by.removesuffix(" (dagster-checkpoints)")
        made.add_row(*row(request.request_id, moment_in_words(request.asked_at), _wish(request), asker, said))
    write(made if found else f"Nothing was asked of {storage.pipeline} lately.")
