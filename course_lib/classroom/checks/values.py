"""Are the values right, where they should be, and is nothing else touched?"""

from __future__ import annotations

import torch

from course_lib.classroom.checks.diary import Observation
from course_lib.classroom.checks.verdict import Verdict, failed, plural
from course_lib.classroom.checks.world import World, traffic_line

_SHOWN = 6


def judge_values(world: World, number: int, observed: list[Observation]) -> Verdict | None:
    """The first thing wrong with the results of case `number`, or None."""
    for rank, one in enumerate(observed):
        text = _problem(world, number, rank, one)
        if text:
            return failed(f"{text} {world.where(number)}", _lines(world, number, observed))
    return None


def _problem(world: World, number: int, rank: int, one: Observation) -> str:
    exercise, case = world.exercise, world.cases[number]
    right = exercise.expected(case, rank, world.size)
    in_place, target = exercise.in_place, exercise.arguments.split(",")[0]
    if one.result is None or one.result.numel() != right.numel():
        got = one.returned or "None"
        wanted = plural(right.numel(), exercise.noun.removesuffix("s"))
        return f"rank {rank} returned {got}; expected a list of {wanted}, one of each rank"
    wrong = ~case.close(one.result, right, world.size)
    if bool(wrong.any()):
        if in_place and _is(case, one.returned_result, right, world.size):
            return (
                f"rank {rank} returned the right {exercise.noun}, but `{target}` does not hold it: write the result "
                f"into `{target}`, for example with {target}.copy_(...), and return nothing"
            )
        at = int(wrong.nonzero()[0])
        got, want = one.result[at].item(), right[at].item()
        hint = _explain(world, number, rank, at, got)
        sentence = (
            f"wrong {exercise.noun}: rank {rank} ended with {got:g} at position {at}, where {want:g} is right"
        )
        return sentence + (f": {hint}" if hint else "")
    if in_place and one.returned:
        how = f"the result belongs into `{target}`; return nothing"
        return f"right {exercise.noun}, but rank {rank} returned {one.returned}: {how}"
    if one.complaints:
        return f"right {exercise.noun}, but on rank {rank} {one.complaints[0]}"
    return ""


def _is(case, got: torch.Tensor | None, right: torch.Tensor, world_size: int) -> bool:
    if got is None or got.numel() != right.numel() or right.numel() == 0:
        return False
    return bool(case.close(got, right, world_size).all())


def _explain(world: World, number: int, rank: int, at: int, got: float) -> str:
    """What the wrong value is, if it is something that can be recognised."""
    exercise, case, N = world.exercise, world.cases[number], world.size
    if case.values == "rounding":
        return ""
    right = exercise.expected(case, rank, N)
    near = lambda value: abs(got - value) <= 1e-3 * max(1.0, abs(value)) and got != right[at].item()
    if got == 77:
        return "nothing was written there"
    if exercise.noun != "sum":
        return _explain_place(exercise.expected(case, rank, N), at, near)
    offset = _offset(world, number, rank)
    inputs = [case.of_rank(r)[offset + at].item() for r in range(N)]
    candidates = [(inputs[rank], "its own value, as it was before")]
    candidates += [(inputs[r], f"the value of rank {r} alone") for r in range(N)]
    if case.op != "max":
        total, share = sum(inputs), N if case.op == "avg" else 1
        candidates += [((total - inputs[r]) / share, f"rank {r}'s value is missing") for r in range(N)]
        candidates += [((total + inputs[r]) / share, f"rank {r}'s value was added twice") for r in range(N)]
        candidates += [
            (total / share / N, f"divided by {N}" + (" once more" if share > 1 else "")),
            (total / share * N, "never divided" if share > 1 else f"{N} times too much"),
        ]
    for value, text in candidates:
        if near(value):
            return text
    return _explain_place(case.reduced(N), offset + at, near)


def _explain_place(results: torch.Tensor, at: int, near) -> str:
    for other, value in enumerate(results.tolist()):
        if other != at and near(value):
            return f"that is the result of position {other}, in the wrong place"
    return ""


def _offset(world: World, number: int, rank: int) -> int:
    """Where in the whole tensor this rank's result begins."""
    case, exercise = world.cases[number], world.exercise
    lengths = [exercise.expected(case, r, world.size).numel() for r in range(world.size)]
    return 0 if lengths[rank] == case.length else sum(lengths[:rank])


def _lines(world: World, number: int, observed: list[Observation]) -> list[str]:
    case, lines = world.cases[number], []
    for rank, one in enumerate(observed):
        right = world.exercise.expected(case, rank, world.size)
        if _is(case, one.result, right, world.size) or (one.result is not None and right.numel() == 0):
            text = f"ended with the right {world.exercise.noun}"
        elif one.result is None:
            text = f"returned {one.returned or 'None'}"
        else:
            text = f"ended with {_show(one.result)}, right is {_show(right)}"
        lines.append(f"rank {rank}: {text}; {traffic_line(one.sent, one.messages, one.received)}")
    return lines


def _show(values: torch.Tensor) -> str:
    shown = [f"{value:g}" for value in values[:_SHOWN].tolist()]
    return "[" + ", ".join(shown + (["..."] if len(values) > _SHOWN else [])) + "]"
