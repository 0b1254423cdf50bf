"""Exercises whose function is a part of a larger run: it is put into the library's program, and the run is
judged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from course_lib.classroom.checks.endings import clean
from course_lib.classroom.checks.verdict import Verdict, failed
from course_lib.runtime.errors import LaunchError, RankError, ranks_text
from course_lib.runtime.launcher import launch
from course_lib.runtime.pickling import CannotSend
from course_lib.runtime.pool import RankResults


class Wrong(Exception):
    """Raised in a rank: what is wrong with the learner's function, as the verdict says it."""


@dataclass(frozen=True)
class RunExercise:
    """`arguments`: the names with which the library calls the function, those after "*, " by keyword; `solution`: the
    library's own. `takes_text`: the answer may also be a script, as text or as the Path of a file.
    """

    takes_text: ClassVar[bool] = False
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
        """The verdict on a run that did not come to its end."""
        if isinstance(error, RankError) and error.exc_type == Wrong.__name__:
            return failed(error.exc_message)
        if isinstance(error, RankError):
            how = f"raised {error.exc_type}" if error.exc_type else "ended"
            return failed(f"{ranks_text([error.rank])} {how}: {clean(error.exc_message)}")
        return failed("it does not end: your function did not return, and everybody waits for the server")


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
