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
    with_outcome,
    write,
    write_json,
)
from dagster_checkpoints.cli.status_view import current
from dagster_checkpoints.cli.storage_options import Seconds, StorageOptions, asked_by, storage_options
from dagster_checkpoints.control.pipeline_control import PipelineControl, RequestHandle, RequestTimedOut
from dagster_checkpoints.control.requests import NO_RUNNING_PIPELINE, Answer, ControlRequest
from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.execution.job_requests import BoundedSources
from dagster_checkpoints.files.urls import url_scheme
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

_GRACE_SECONDS = 15.0  # the owner counts its deadline from when it sees the request
_STATUS_SECONDS = 2.0
_UPDATE = "dagster_checkpoints.cli.update"
"""Key in click's `meta`: the function that updates the progress display."""


@dataclass(frozen=True)
class RequestOptions:
    """The options that all requests share.

    Attributes:
        deadline: seconds that the pipeline may try.
        wait: whether the command waits for the answer.
        request_id: id of the request; None for a random one.
    """

    deadline: float
    wait: bool
    request_id: str | None


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that sends a request; the command gets them as `sending`, a :class:`RequestOptions`."""

    @wraps(command)
    def called(deadline: float, wait: bool, request_id: str | None, **others: Any) -> Any:
        return command(sending=RequestOptions(deadline, wait, request_id), **others)

    for option in reversed(_REQUEST_OPTIONS):
        called = option(called)
    return called


_REQUEST_OPTIONS = (
    click.option(
        "--deadline",
        type=Seconds(min=0, min_open=True),
        default=600.0,
        metavar="SECONDS",
        show_default=True,
        help="How long the pipeline may try.",
    ),
    click.option("--wait/--no-wait", default=True, help="Wait for the answer, or only send the request.", show_default=True),
    click.option(
        "--request-id",
        metavar="ID",
        help="Id of the request. A second request under the same id has no effect and gets the same answer.",
    ),
)
_target = click.option(
    "--target",
    metavar="DIR",
    help="Directory (or URL) in which the savepoint is made. Default: that of the pipeline's savepoints.",
)
_name = click.option("--name", metavar="NAME", help="Part of the savepoint's directory's name.")


@click.command()
@request_options
@storage_options
def trigger(options: StorageOptions, sending: RequestOptions) -> None:
    """Request a checkpoint of the running pipeline now, between the periodic ones."""
    with _control(options) as control:
        handle = control.checkpoint(request_id=sending.request_id, deadline=sending.deadline)
        _show_answer(options, control, handle, sending)


@click.command()
@_target
@_name
@request_options
@storage_options
def savepoint(options: StorageOptions, sending: RequestOptions, target: str | None, name: str | None) -> None:
    """Request a savepoint of the running pipeline; the pipeline runs on.

    A savepoint is self-contained: it may be copied, moved and kept, and only `dispose` deletes it.
    """
    with _control(options) as control:
        handle = control.savepoint(
            target=_absolute(target), name=name or "", request_id=sending.request_id, deadline=sending.deadline
        )
        _show_answer(options, control, handle, sending)


@click.command()
@click.option(
    "--drain", is_flag=True, help="End all sources first, so that every window is emitted. A drained pipeline is not resumed."
)
@click.option(
    "--bounded",
    type=click.Choice(["cut", "finish"]),
    default="cut",
    show_default=True,
    help="Of a drain: end bounded sources where they are, or read them to their end first, while unbounded sources go on.",
)
@click.option(
    "--when-caught-up",
    is_flag=True,
    help="Of a drain: wait until every source has read what is there, for at most --deadline, and ask for it then.",
)
@_target
@_name
@request_options
@storage_options
def stop(
    options: StorageOptions,
    sending: RequestOptions,
    drain: bool,
    bounded: BoundedSources,
    when_caught_up: bool,
    target: str | None,
    name: str | None,
) -> None:
    """Stop the running pipeline with a savepoint: rows before it are committed, rows after it are not processed.

    By default the pipeline is suspended, and its next run resumes from that savepoint. If the savepoint fails, a suspended
    pipeline runs on; one that was to be drained restarts from its latest checkpoint.
    """
    if when_caught_up and not drain:
        raise UsageProblem("--when-caught-up is only for a drain: what a suspended pipeline has not read, its next run reads")
    with _control(options) as control:
        if when_caught_up:
            _wait_until_caught_up(control, sending.deadline)
        behind = _behind(control) if drain else []
        handle = control.stop(
            drain=drain,
            bounded=bounded,
            target=_absolute(target),
            name=name or "",
            request_id=sending.request_id,
            deadline=sending.deadline,
        )
        _show_answer(options, control, handle, sending)
        if behind and not options.as_json:
            click.echo(
                f"Not caught up when the drain was asked for: {', '.join(behind)}. What a source had not read when it ended is "
                "left, and the next run does not go on from here.",
                err=True,
            )


@click.command("end-source")
@click.argument("stage")
@click.option("--instance", metavar="NAME", help="Only this instance of the source. Default: all instances.")
@request_options
@storage_options
def end_source(options: StorageOptions, sending: RequestOptions, stage: str, instance: str | None) -> None:
    """End the source STAGE as if its input were exhausted. Stages that read only this source finish as well."""
    with _control(options) as control:
        handle = control.end_source(stage, instance, request_id=sending.request_id, deadline=sending.deadline)
        _show_answer(options, control, handle, sending)


@click.command()
@click.argument("request_id", required=False)
@click.option("--wait", is_flag=True, help="Wait for the answer to REQUEST_ID.")
@click.option(
    "--timeout",
    type=Seconds(min=0, min_open=True),
    default=600.0,
    metavar="SECONDS",
    show_default=True,
    help="How long to wait.",
)
@storage_options
def requests(options: StorageOptions, request_id: str | None, wait: bool, timeout: float) -> None:
    """The requests to the pipeline, newest first, or the one with REQUEST_ID. Requests answered long ago are deleted."""
    if request_id is None and wait:
        raise UsageProblem("--wait needs a REQUEST_ID to wait for")
    with options.open() as storage:
        options.state(storage)
        control = PipelineControl(storage, asked_by=asked_by(), sleep=_sleep)
        if request_id is not None:
            _show_answer(options, control, control.handle(request_id), RequestOptions(timeout, wait, request_id), just_sent=False)
        else:
            _list(options, storage, control)


# Sending


@contextmanager
def _control(options: StorageOptions) -> Iterator[PipelineControl]:
    with options.open() as storage:
        options.state(storage)
        yield PipelineControl(storage, asked_by=asked_by(), sleep=_sleep)


def _behind(control: PipelineControl) -> list[str]:
    """The sources that have more to read, by the run's status; none if there is no status, or it cannot be read."""
    status = _status(control)
    return [
        f"{stage.name}[{instance.name}]" if len(stage.instances) > 1 else stage.name
        for stage in (status.stages if status is not None else ())
        for instance in stage.instances
        if instance.caught_up is False and not stage.inputs
    ]


def _wait_until_caught_up(control: PipelineControl, seconds: float) -> None:
    """Wait until the run says of every source that it has ended, or read what is there; by a status that is new since the call.

    Raises:
        RequestTimedOut: Some have not within that time.
    """
    until, first = monotonic() + seconds, None
    while (state := control.state()) is not None and state.lease is not None:
        status = _status(control)
        waits = [
            f"{stage.name}[{instance.name}]"
            for stage in (status.stages if status is not None else ())
            for instance in stage.instances
            if not (stage.inputs or stage.finished or instance.end_of_data or instance.caught_up)
        ]
        if status is not None:
            first = status.sequence if first is None else first
            if status.sequence > first and not waits:
                return
        if monotonic() >= until:
            found = f"{', '.join(waits)} not caught up" if waits else "no new status of the run"
            raise RequestTimedOut(
                f"expected every source to have read what is there within {seconds_in_words(seconds)}, found {found}; no drain "
                "was asked for. A feed is caught up when nothing new has come for a moment: let what writes it pause, or wait "
                "longer (--deadline)"
            )
        _sleep(_STATUS_SECONDS)


def _sleep(seconds: float) -> None:
    """Pause between two reads of the answer, and update the progress display."""
    update = click.get_current_context().meta.get(_UPDATE)
    if update is not None:
        update()
    sleep(seconds)


def _absolute(target: str | None) -> str:
    """The target as an absolute path or URL: a relative path is relative to the user's directory, not to the pipeline's."""
    if not target or url_scheme(target) is not None:  # as it is: what is no URL of a storage is refused by name
        return target or ""
    return os.path.abspath(os.path.expanduser(target))


def _show_answer(
    options: StorageOptions, control: PipelineControl, handle: RequestHandle, sending: RequestOptions, *, just_sent: bool = True
) -> None:
    if not sending.wait:
        _show_result(options, handle.request, handle.poll())
        return
    timeout = sending.deadline + (_GRACE_SECONDS if just_sent else 0.0)
    try:
        with _progress_display(options, control, handle):
            answer = handle.wait(timeout)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; the request stays valid. To see its answer: dagster-checkpoints requests {handle.request_id}"
        ) from None
    _show_result(options, handle.request, answer)


@contextmanager
def _progress_display(options: StorageOptions, control: PipelineControl, handle: RequestHandle) -> Iterator[None]:
    """On a terminal, show the request that the command waits for, and the pipeline's progress."""
    terminal = console(error=True)
    if options.as_json or not terminal.is_terminal:
        yield
        return
    subject = f"{_subject(handle.request)}, request {handle.request_id}"
    updated_at = monotonic() - _STATUS_SECONDS
    context = click.get_current_context()
    with terminal.status(f"Waiting for {subject}") as spinner:

        def update() -> None:
            nonlocal updated_at
            if monotonic() - updated_at >= _STATUS_SECONDS:
                updated_at = monotonic()
                spinner.update(f"Waiting for {subject}{_progress(control)}")

        context.meta[_UPDATE] = update
        try:
            yield
        finally:
            context.meta.pop(_UPDATE, None)


def _status(control: PipelineControl) -> PipelineStatus | None:
    """The status of the run that owns the pipeline; None if it has written none: the file may be that of an earlier run."""
    try:
        state = control.state()
        return current(state, control.status()) if state is not None else None
    except StorageError:  # for display only: no request depends on it
        return None


def _progress(control: PipelineControl) -> str:
    status = _status(control)
    if status is None:
        return ""
    activities = [f"{p.kind} {p.checkpoint_id}: {p.acknowledged} of {p.expected} tasks" for p in status.pending]
    if status.stop is not None and status.stop.waits_for:
        activities.insert(0, status.stop.text)
    if status.phase != "running":
        activities.insert(0, status.phase)
    return f" ({'; '.join(activities)})" if activities else ""


# Showing


def _subject(request: ControlRequest) -> str:
    match request.kind:
        case "checkpoint":
            return "a checkpoint"
        case "savepoint":
            return "a savepoint"
        case "stop":
            return "a stop with drain" if request.drain else "a stop (suspend)"
        case "end_source":
            return f"the end of source {_source(request)}"


def _source(request: ControlRequest) -> str:
    return request.stage + (f"[{request.instance}]" if request.instance is not None else "")


def _show_result(options: StorageOptions, request: ControlRequest, answer: Answer | None) -> None:
    in_words = _in_words(request, answer)
    with with_outcome("\n".join(str(part) for part in in_words)):
        if options.as_json:
            write_json({"request": request, "answer": answer, "status": answer.status if answer else "asked"})
        else:
            write(*in_words)
    if answer is not None and answer.status == "failed":
        code = Exit.NOT_RUNNING if answer.reason == NO_RUNNING_PIPELINE else Exit.FAILED
        click.get_current_context().exit(int(code))


def _in_words(request: ControlRequest, answer: Answer | None) -> list[Any]:
    from rich.text import Text

    if answer is None or not answer.final:
        state = "accepted" if answer is not None else "requested"
        return [
            Text(f"{_subject(request).capitalize()} is {state}: request {request.request_id}"),
            Text(f"To see its answer: dagster-checkpoints requests {request.request_id}", style="dim"),
        ]
    if answer.status == "failed":
        return [Text(f"{_subject(request).capitalize()} failed: {answer.reason}: {answer.message}", style="red")]
    answered_after = seconds_in_words((answer.answered_at - request.asked_at).total_seconds())
    duration = answer.details.get("duration")
    fields = facts(
        ("location", answer.location),
        ("url", answer.url if answer.url != answer.location else ""),
        ("took", "" if duration is None else seconds_in_words(duration)),
        ("request", f"{request.request_id}, answered after {answered_after}"),
    )
    return [Text(_outcome(request, answer), style="bold"), fields, *([Text(answer.message)] if answer.message else [])]


def _outcome(request: ControlRequest, answer: Answer) -> str:
    number = "" if answer.checkpoint_id is None else f" {answer.checkpoint_id}"
    match request.kind:
        case "checkpoint":
            return f"Checkpoint{number} is complete"
        case "savepoint":
            return f"Savepoint{number} is complete; the pipeline runs on"
        case "stop" if request.drain:
            return f"Drained with savepoint{number}; the next run is a new start{_cut(answer)}"
        case "stop":
            return f"Suspended with savepoint{number}; the next run resumes from it"
        case _ if answer.details.get("ended"):
            return f"Source {_source(request)} has received the request to end"
        case _:
            return f"Source {_source(request)} had ended before: there was nothing to do"


def _cut(answer: Answer) -> str:
    """Which bounded sources the drain has cut."""
    cut = answer.details.get("cut", ())
    return f". Not read to their end: {', '.join(map(str, cut))} (--bounded finish reads bounded sources first)" if cut else ""


def _list(options: StorageOptions, storage: CheckpointStorage, control: PipelineControl) -> None:
    answered = []
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
            answered.append((request, answer))
    answered.sort(key=lambda pair: pair[0].asked_at, reverse=True)
    if options.as_json:
        write_json([{"request": request, "answer": answer} for request, answer in answered])
        return
    listing = table("request", "asked (UTC)", "for", "by", "answer", keep=("asked (UTC)",))
    for request, answer in answered:
        outcome = "none yet" if answer is None else f"{answer.status} {answer.location or answer.reason}".strip()
        requester = request.asked_by.removesuffix(" (dagster-checkpoints)")
        listing.add_row(*row(request.request_id, moment_in_words(request.asked_at), _subject(request), requester, outcome))
    write(listing if answered else f"There are no recent requests to {storage.pipeline}.")
