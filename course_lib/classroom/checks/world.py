"""One world of ranks on which a function was tried: how the run ended, and what its ranks wrote down."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.classroom.checks.cases import Case
from course_lib.classroom.checks.diary import CaseLog, Observation
from course_lib.classroom.checks.exercises import Exercise
from course_lib.classroom.checks.verdict import plural
from course_lib.runtime.errors import LaunchError


@dataclass
class World:
    """`logs[rank]`: its cases in order, as far as it came. `error`: why the run ended early, or None."""

    exercise: Exercise
    size: int
    cases: list[Case]
    logs: list[list[CaseLog]]
    error: LaunchError | None = None

    def case_logs(self, number: int) -> list[CaseLog]:
        """Case `number` as each rank saw it; an empty log for a rank that never began it."""
        return [log[number] if number < len(log) else CaseLog() for log in self.logs]

    def observed(self, number: int) -> list[Observation] | None:
        """What each rank observed in case `number`, or None if not every rank came to its end."""
        ended = [log.ended for log in self.case_logs(number)]
        return None if any(one is None for one in ended) else ended  # type: ignore[return-value]

    def where(self, number: int) -> str:
        """For the end of a sentence: "(4 ranks, 12 float32)"."""
        return f"({plural(self.size, 'rank')}, {self.cases[number]})"

    def right(self) -> str:
        return f"right {self.exercise.noun}"


def traffic_line(sent: int, messages: int, received: int) -> str:
    return (
        f"sent {plural(sent, 'byte')} in {plural(messages, 'message')}, received {plural(received, 'byte')}"
    )
