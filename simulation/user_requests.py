"""The requests of simulated users, and their answers."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_checkpoints.execution.job_requests import AnswerRequest, Request
from simulation.violations import check


@dataclass(eq=False)
class UserRequest:
    """A request of one user, or of several with the same request id.

    Attributes:
        request: the request that the job receives from each of the users.
        users: number of users.
        answers: number of users that have an answer.
    """

    request: Request
    users: int
    answers: int = 0

    @property
    def answered(self) -> bool:
        return self.answers == self.users

    def answer(self, answer: AnswerRequest) -> bool:
        """Record the answer to one of the users. Returns whether it names a savepoint that the user may rely on."""
        request_id = self.request.request_id
        check(not self.answered, f"request {request_id} has more answers than users")
        check(answer.request_id == request_id, f"{request_id} gets the answer of {answer.request_id}")
        self.answers += 1
        return answer.done and self.request.kind in ("savepoint", "stop")
