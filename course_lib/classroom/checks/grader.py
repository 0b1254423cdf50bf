"""`check`: run what a learner wrote on real ranks, and say in one sentence what is wrong with it."""

from __future__ import annotations

import dis
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_lib.classroom.checks.catalogue import CATALOGUE, exercise_named
from course_lib.classroom.checks.costs import judge_costs
from course_lib.classroom.checks.diary import read
from course_lib.classroom.checks.endings import clean, judge_ending
from course_lib.classroom.checks.exercises import Exercise
from course_lib.classroom.checks.on_rank import run_cases
from course_lib.classroom.checks.runs import RunExercise
from course_lib.classroom.checks.values import judge_values
from course_lib.classroom.checks.verdict import NOT_ATTEMPTED, Verdict, failed
from course_lib.classroom.checks.world import World
from course_lib.runtime.errors import LaunchError
from course_lib.runtime.pickling import CannotSend
from course_lib.runtime.pool import Pool

WORLD_SIZES = (1, 2, 3, 4)


def check(name: Any, fn: Any = None, *, timeout: float = 5.0) -> Verdict:
    """Run `fn` on 1, 2, 3 and 4 ranks and judge it as the exercise `name`: `check("ring_all_reduce", my_ring)`.

    `check(fn)` does for a function whose name is or ends with an exercise's name. (An exercise on a script takes its
    text, or its Path.) Looked at, in this order: that it ends (no rank waits longer than `timeout` seconds in one
    communication, no world runs longer than twice that), that the values are right and where they should be, that it is
    made of messages, to the right neighbours, its bytes, the number of its messages, and that all ranks end with the
    same bits. The verdict names the first thing wrong, in the smallest world. Whatever the function does, the notebook
    goes on. The ranks run on the CPU, with gloo; what they print is not shown (use `launch` to watch them).

    Raises ValueError for an unknown exercise, TypeError if there is no function (or text).
    """
    exercise, fn = _arguments(name, fn)
    if is_stub(fn):
        return NOT_ATTEMPTED
    if isinstance(exercise, RunExercise):
        return exercise.grade(fn, timeout)
    problem, with_op = _signature(exercise, fn)
    if problem:
        return failed(problem)
    worlds: list[World] = []
    for world_size in WORLD_SIZES:
        try:
            world = _run(exercise, fn, world_size, with_op, timeout)
        except CannotSend as error:
            return failed(f"your function cannot be sent to the ranks: {clean(str(error))}")
        verdict = _first_problem(world)
        if verdict is not None:
            return verdict
        worlds.append(world)
    return judge_costs(worlds) or _passed(exercise, worlds, with_op)


def _arguments(name: Any, fn: Any) -> tuple[Exercise | RunExercise, Callable[..., Any]]:
    if callable(name):
        name, fn = fn, name
    takes_text = isinstance(name, str) and getattr(CATALOGUE.get(name), "takes_text", False)
    if takes_text:
        fn = _as_function(fn)
    if not callable(fn):
        expected = (
            "the text of a script, its Path, or a function that returns it" if takes_text else "a function"
        )
        example = f'check("{name}", text)' if takes_text else 'check("ring_all_reduce", my_function)'
        raise TypeError(f"fn: expected {expected}, as in {example}; got {fn!r}")
    if name is None:
        own = getattr(fn, "__name__", "")
        name = next((known for known in CATALOGUE if own == known or own.endswith(f"_{known}")), own)
    return exercise_named(name), fn


def _as_function(answer: Any) -> Any:
    """A script, as text or as the Path of a file, as a function that returns it; `...` as one that does nothing."""
    if answer is ...:
        return lambda old: None
    text = answer.read_text(encoding="utf-8") if isinstance(answer, Path) else answer
    return (lambda old: text) if isinstance(text, str) else answer


def is_stub(fn: Callable[..., Any]) -> bool:
    """Whether there is nothing in it: only a docstring, `...`, `pass` or `raise NotImplementedError`."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return False
    skip = {"RESUME", "NOP", "CACHE", "PUSH_NULL", "MAKE_CELL", "COPY_FREE_VARS"}
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname not in skip]
    returns_none = all(name.startswith(("LOAD_CONST", "RETURN")) and value is None for name, value in steps)
    return returns_none or steps[0][1] == "NotImplementedError"


def _signature(exercise: Exercise, fn: Callable[..., Any]) -> tuple[str, bool]:
    """(what is wrong with the parameters or "", whether there is a parameter `op`)."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return "", False
    needed = ["comm", *exercise.arguments.split(", ")]
    with_op = exercise.takes_op and "op" in signature.parameters
    try:
        signature.bind(*needed, **({"op": "sum"} if with_op else {}))
    except TypeError:
        return f"your function takes {signature}; the exercise calls it with {exercise.call}", with_op
    return "", with_op


def _run(exercise: Exercise, fn: Callable[..., Any], world_size: int, with_op: bool, timeout: float) -> World:
    cases, error = exercise.cases(world_size, with_op), None
    own = fn is exercise.solution
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Pool(world_size, backend="gloo", timeout=timeout, deadline=2 * timeout, show="none") as pool:
                pool.run(run_cases, fn, exercise.name, cases, folder, own)
        except LaunchError as launch_error:
            error = launch_error
        logs = [read(folder, rank) for rank in range(world_size)]
    if error is not None and not any(logs):
        raise error.with_traceback(None) from None  # not the function's doing: no rank came to call it
    return World(exercise, world_size, cases, logs, error)


def _first_problem(world: World) -> Verdict | None:
    for number in range(len(world.cases)):
        observed = world.observed(number)
        verdict = judge_ending(world, number) if observed is None else judge_values(world, number, observed)
        if verdict is not None:
            return verdict
    return None


def _passed(exercise: Exercise, worlds: list[World], with_op: bool) -> Verdict:
    num_cases = sum(len(world.cases) for world in worlds)
    only = " (sum only: your function takes no op)" if exercise.takes_op and not with_op else ""
    text = (
        f"passed: the right {exercise.noun} on 1, 2, 3 and 4 ranks in {num_cases} cases{only}, with exactly the bytes "
        f"and messages of {exercise.what}"
    )
    return Verdict(passed=True, attempted=True, text=text)
