"""Exercises whose function is a part of a larger run: it is put into the library's program, and the run is judged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from course_lib.classroom.checks.endings import clean, raised
from course_lib.classroom.checks.verdict import NOT_ATTEMPTED, Verdict, failed
from course_lib.runtime.errors import LaunchError, RankError
from course_lib.runtime.launcher import launch
from course_lib.runtime.pickling import CannotSend
from course_lib.runtime.pool import RankResults


class Wrong(Exception):
    """Raised in a rank: what is wrong with the learner's function, as the verdict says it."""


def it_raised(error: Exception) -> str:
    """The learner's function raised this."""
    return f"your function {raised(type(error).__name__, str(error))}"


def it_returned(value: Any) -> str:
    """The learner's function returned this, where something of another type was expected."""
    return f"your function returned {'None' if value is None else f'a value of type {type(value).__name__}'}"


@dataclass(frozen=True)
class RunExercise:
    """`arguments`: the names with which the library calls the function, those after "*, " by keyword; `solution`: the
    library's own. `takes_text`: the answer may also be a script, as text or as the Path of a file. `endless`: the
    verdict on a run that does not end.
    """

    takes_text: ClassVar[bool] = False
    endless: ClassVar[str] = "it does not end: your function did not return"
    name: str
    arguments: str
    solution: Callable[..., Any]

    def grade(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        """Put `fn` into its place, run, judge."""
        by_place, _, by_keyword = self.arguments.partition("*, ")
        try:
            inspect.signature(fn).bind(
                *filter(None, by_place.split(", ")), **dict.fromkeys(filter(None, by_keyword.split(", ")))
            )
        except TypeError:
            return failed(
                f"your function takes {inspect.signature(fn)}; the exercise calls it with ({self.arguments})"
            )
        except ValueError:  # a function without a signature to look at
            pass
        try:
            return self.judge(fn, timeout)
        except CannotSend as error:
            return failed(f"your function cannot be sent to the ranks: {clean(str(error))}")
        except LaunchError as error:
            return self.ending(error)

    def judge(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        raise NotImplementedError

    def ending(self, error: LaunchError) -> Verdict:
        """The verdict on a run that did not come to its end; a function that is half written is no attempt."""
        if not isinstance(error, RankError):
            return failed(self.endless)
        # Not by its type: torch raises NotImplementedError, too, for a dtype that it cannot compute with.
        if "raise NotImplementedError" in error.traceback:
            return NOT_ATTEMPTED
        if error.exc_type == Wrong.__name__:
            return failed(error.exc_message)
        how = raised(error.exc_type, error.exc_message) if error.exc_type else clean(error.exc_message)
        return failed(f"rank {error.rank} {how}")


def run(program: Callable[..., Any], *args: Any, world_size: int, timeout: float) -> RankResults:
    """`program(comm, *args)` on the CPU, quietly, and not for ever."""
    return launch(
        program,
        *args,
        world_size=world_size,
        backend="gloo",
        timeout=timeout,
        deadline=4 * timeout,
        show="none",
    )
