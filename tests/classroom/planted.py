"""Answers planted for the tests of graders: wrong ones, with what must be said of each, and right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from course_lib.classroom.checks import check


class Planted:
    """The answers to some exercises, in the order in which the decorators met them.

    `faults`: exercise -> (function, what the verdict must begin with and hold, options of `check`).
    `right_answers`: exercise -> functions.
    """

    def __init__(self, exercises: Iterable[str]) -> None:
        self.faults: dict[str, list[tuple[Callable, tuple[str, ...], dict[str, Any]]]] = {
            n: [] for n in exercises
        }
        self.right_answers: dict[str, list[Callable]] = {name: [] for name in self.faults}
        self._said: list[tuple[str, str, str]] = []

    def fault(self, exercise: str, *said: str, **options: Any) -> Callable[[Callable], Callable]:
        def keep(fn: Callable) -> Callable:
            self.faults[exercise].append((fn, said, options))
            return fn

        return keep

    def right(self, exercise: str) -> Callable[[Callable], Callable]:
        def keep(fn: Callable) -> Callable:
            self.right_answers[exercise].append(fn)
            return fn

        return keep

    # --- for the tests

    def wrong_cases(self) -> list[Any]:
        """Arguments (name, fn, said, options), in a test for each."""
        return [_case(name, *row) for name, rows in self.faults.items() for row in rows]

    def right_cases(self) -> list[Any]:
        """Arguments (name, fn), in a test for each."""
        return [_case(name, fn) for name, fns in self.right_answers.items() for fn in fns]

    def caught(self, name: str, fn: Callable, said: tuple[str, ...], options: dict[str, Any]) -> Any:
        """The verdict, which must be as planted: attempted, not passed, one line, and what was to be said."""
        verdict = check(name, fn, **options)
        self._said.append((name, fn.__name__, verdict.text))
        assert not verdict.passed and verdict.attempted
        assert verdict.text.startswith(said[0]), verdict
        assert all(part in verdict.text for part in said), verdict
        assert "\n" not in verdict.text
        return verdict

    def table(self) -> str:
        """What was said of each, to print at the end of the run."""
        lines = ["planted faults, and what the grader said of each:"]
        for name in self.faults:
            said = [(fault, text) for exercise, fault, text in self._said if exercise == name]
            lines += [f"  {name}: {len(said)} wrong answers caught"] if said else []
            lines += [f"    {fault:<26}{text}" for fault, text in said]
        return "\n".join(lines)


def _case(name: str, fn: Callable, *more: Any) -> Any:
    return pytest.param(name, fn, *more, id=f"{name}-{fn.__name__}")
