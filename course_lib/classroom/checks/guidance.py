"""Help with an exercise: hints that open one at a time, and the solution."""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

from course_lib.classroom.checks.catalogue import exercise_named
from course_lib.classroom.checks.hints import HINTS
from course_lib.classroom.checks.verdict import plural

_opened: dict[str, int] = {}


def hint(name: str) -> None:
    """Print the next hint for exercise `name`, and how many are left. Raises ValueError for an unknown exercise."""
    hints = HINTS[exercise_named(name).name]
    number = _opened.get(name, 0)
    if number == len(hints):
        print(f"All {len(hints)} hints are open:")
        for index, text in enumerate(hints, start=1):
            print(f"{index}. {text}")
        print(f'The solution: show_solution("{name}")')
        return
    _opened[name] = number + 1
    left = len(hints) - number - 1
    rest = (
        f"{plural(left, 'hint')} left"
        if left
        else f'that was the last; the solution: show_solution("{name}")'
    )
    print(f"Hint {number + 1} of {len(hints)}: {hints[number]}\n({rest})")


def close_hints() -> None:
    """Begin with the first hint again, for every exercise."""
    _opened.clear()


def show_solution(name: str) -> None:
    """Print the source of the function that solves exercise `name`, and of the helpers in its module that it calls.

    Where the answer is a script, print the script.

    Raises ValueError for an unknown exercise.
    """
    exercise = exercise_named(name)
    solution = exercise.solution
    print(f"# {solution.__module__.replace('.', '/')}.py\n")
    if getattr(exercise, "takes_text", False):
        print(inspect.getsource(sys.modules[solution.__module__]).rstrip())
        return
    print(
        "\n\n".join(
            textwrap.dedent(inspect.getsource(function)).rstrip() + "\n"
            for function in _with_helpers(solution)
        ).rstrip()
    )


def _with_helpers(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The function, then those of its module (or of its class, for a method) that it calls, and theirs, as called."""
    module = sys.modules[function.__module__]
    methods = (
        vars(getattr(module, function.__qualname__.split(".")[0])) if "." in function.__qualname__ else {}
    )
    found: list[Any] = [function]
    for current in found:
        for name in _names(inspect.unwrap(current).__code__):
            helper = methods.get(name) or getattr(module, name, None)
            own = inspect.isfunction(helper) and helper.__module__ == module.__name__
            if own and helper not in found:
                found.append(helper)
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
