"""The requests of simulated users, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_checkpoints.execution.job_requests import AnswerRequest, Request
from simulation.shapes import name_of
from simulation.violations import check


@dataclass(eq=False)
class UserRequest:
    """A request of one user, or of several with the same request id.

    Attributes:
        kind: "checkpoint", "savepoint", "suspend", "drain" or "end_source".
        seconds: time limit of the request.
        stage: for "end_source", the number of the stage.
        answers: one for each user.
    """

    request_id: str
    kind: str
    seconds: float
    stage: int
    users: int
    answers: tuple[AnswerRequest, ...] = ()

    @property
    def answered(self) -> bool:
        return len(self.answers) == self.users

    def as_received(self) -> Request:
        kind: Any = "stop" if self.kind in ("suspend", "drain") else self.kind
        return Request(self.request_id, kind, self.seconds, self.kind == "drain", name_of(self.stage))

    def answer(self, answer: AnswerRequest) -> None:
        """Record the answer to one of the users."""
        check(not self.answered, f"request {self.request_id} has more answers than users")
        check(answer.request_id == self.request_id, f"{self.request_id} gets the answer of {answer.request_id}")
        self.answers += (answer,)

    @property
    def names_savepoint(self) -> bool:
        """Whether the answer names a savepoint that the users may rely on."""
        return bool(self.answers) and self.answers[-1].done and self.kind in ("savepoint", "suspend", "drain")
