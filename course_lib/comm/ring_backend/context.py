"""What torch's calls cannot carry to a group: the launch it belongs to, and the algorithms to use.

torch's DDP asks its process group for an all_reduce and hands over a tensor, nothing else. So these two are set for the
whole process: by the launcher once, and by you with `plugged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from course_lib.comm.board import Board, NullBoard
from course_lib.comm.communicator import Communicator
from course_lib.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


@dataclass(frozen=True)
class Algorithms:
    """The collectives that can be replaced, with the signatures of `comm.collectives`."""

    all_reduce: Callable = ring_all_reduce  # (comm, tensor, op)
    reduce_scatter: Callable = ring_reduce_scatter  # (comm, out, tensor, op)
    all_gather: Callable = ring_all_gather  # (comm, out, tensor)


_algorithms = Algorithms()
_launch: Communicator | None = None


def algorithms() -> Algorithms:
    return _algorithms


def is_plugged() -> bool:
    return _algorithms != Algorithms()


def launch() -> Communicator | None:
    """The launch's communicator, whose ledger, trace and board the groups share; None outside the launcher."""
    return _launch


def board() -> Board | NullBoard:
    """Where to note that this rank waits."""
    return NullBoard() if _launch is None else _launch.board


def attach(comm: Communicator) -> None:
    """From now on, groups of this process write into `comm`'s ledger, trace and board, and keep to its links."""
    global _launch
    _launch = comm


@contextmanager
def plugged(
    *,
    all_reduce: Callable | None = None,
    reduce_scatter: Callable | None = None,
    all_gather: Callable | None = None,
) -> Iterator[None]:
    """Collectives that are asked for inside use these functions, on all groups of this rank.

    Your own ring takes the place of the course's, and torch's DDP trains on it:

        def train(comm):
            with ring_backend.plugged(all_reduce=my_ring_all_reduce):
                model = DistributedDataParallel(...)
                ...
        launch(train, world_size=4, backend="ring")

    The signatures are those of `comm.collectives`: `all_reduce(comm, tensor, op)`, `reduce_scatter(comm, out, tensor,
    op)`, `all_gather(comm, out, tensor)`; `op` is a name, "sum" for DDP. They run in the group's own thread, on a
    Communicator of its own. Whatever they raise is raised where the collective is waited for; after that the group is
    of no more use, since its ranks no longer agree. Every rank must plug in the same.
    """
    global _algorithms
    given = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
    for name, function in given.items():
        if function is not None and not callable(function):
            raise TypeError(
                f"plugged({name}): expected a function called as collectives.ring_{name} is, got {function!r:.60}"
            )
    before = _algorithms
    _algorithms = Algorithms(**{**vars(before), **{name: f for name, f in given.items() if f is not None}})
    try:
        yield
    finally:
        _algorithms = before
