"""The part of a check that runs in each rank: call the learner's function, case by case, and write down what it did."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from course_lib.classroom.checks.cases import Case
from course_lib.classroom.checks.catalogue import exercise_named
from course_lib.classroom.checks.diary import Diary, Observation, as_tensor
from course_lib.classroom.checks.exercises import Call, Exercise
from course_lib.comm.board import Board
from course_lib.comm.communicator import Communicator
from course_lib.runtime.errors import is_users

LIBRARY_NAMES = frozenset(
    [
        "ring_all_reduce",
        "ring_reduce_scatter",
        "ring_all_gather",
        "tree_all_reduce",
        "tree_reduce",
        "tree_broadcast",
        "naive_all_reduce",
        "hierarchical_all_reduce",
    ]
)
"""The names under which the library's own collectives enter the board."""


def run_cases(
    comm: Communicator, fn: Callable[..., Any], name: str, cases: list[Case], folder: str, own: bool
) -> None:
    """Call `fn` on every case of exercise `name`. `own`: the library's function itself is being checked."""
    exercise, diary = exercise_named(name), Diary(folder, comm.rank)
    assert isinstance(exercise, Exercise)
    try:
        with diary.watching(comm):
            for number, case in enumerate(cases):
                call = exercise.prepare(case, comm.rank, comm.world_size)
                diary.write("began")
                diary.write("ended", _observe(comm, fn, call, diary, own))
                diary.finished(number + 1, comm.world_size)
    finally:
        diary.close()


def _observe(comm: Communicator, fn: Callable[..., Any], call: Call, diary: Diary, own: bool) -> Observation:
    comm.ledger.clear()
    board = comm.board
    assert isinstance(board, Board)
    before = board.num_collectives(comm.rank)
    try:
        returned = fn(comm, *call.args, **call.kwargs)
    except BaseException as error:
        diary.write("raised", (type(error).__name__, str(error), _line(error)))
        raise
    rows = list(comm.ledger)
    entered = board.num_collectives(comm.rank) - before
    names = [entry.op for entry in board.collectives(comm.rank)[:entered]]
    if own:
        names = [name for name in names if name not in LIBRARY_NAMES]
    names += [row.op for row in rows if not row.exact]
    answer = as_tensor(returned)
    return Observation(
        result=answer if call.target is None else as_tensor(call.target),
        returned="" if returned is None else _describe(returned),
        returned_result=answer,
        complaints=tuple(call.complaints()),
        sent=sum(row.bytes_sent for row in rows if row.exact),
        received=sum(row.bytes_received for row in rows if row.exact),
        messages=sum(row.messages for row in rows if row.exact),
        peers=tuple(
            sorted({row.peer for row in rows if row.exact and row.messages and row.peer is not None})
        ),
        collectives=tuple(sorted(set(names))),
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    return f"{article} {kind}" + (f" of {len(value)}" if isinstance(value, list | tuple | dict) else "")


def _line(error: BaseException) -> str:
    """The innermost line that the learner wrote."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame.line for frame in frames if is_users(frame.filename) and frame.line]
    return mine[-1] if mine else ""
