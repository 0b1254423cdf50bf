"""Several worlds in one launch: the first n of the ranks, for n = 1, 2, …"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from course_lib.classroom.checks.verdict import Verdict, failed, joined
from course_lib.comm.communicator import Communicator
from course_lib.runtime.errors import LaunchError, RanksHung, ranks_text


@dataclass(frozen=True)
class Member:
    """A rank in one world: `comm` is for the learner, on `meeting` the grader meets the same ranks undisturbed."""

    comm: Communicator
    meeting: Communicator


def worlds(comm: Communicator) -> dict[int, Member]:
    """World size -> this rank in it, for the worlds it is in, the smallest first."""
    made: dict[int, Member] = {}
    # From the largest: torch's name for a group holds how many groups a rank has made before.
    for size in range(comm.world_size, 0, -1):
        part = comm.subgroup(range(size))
        if part is not None:
            made[size] = Member(part, _another(part))
    return dict(reversed(made.items()))


def _another(comm: Communicator) -> Communicator:
    """The same ranks, on a connection of their own."""
    with comm.board.wait("subgroup"):
        group: Any = dist.new_group(list(comm.ranks), use_local_synchronization=True)
    return Communicator(group, comm.device, t0=comm.t0, board=comm.board)


def hang(error: LaunchError) -> Verdict | None:
    """The verdict on ranks that wait for each other in the learner's function; None for another end."""
    if not isinstance(error, RanksHung):
        return None
    waiting: dict[str, list[int]] = {}
    for rank, told in enumerate(error.ranks):
        found = re.match(r"waiting in (\w+)", told)
        if found and found[1] != "barrier" and found[1] != "subgroup":
            waiting.setdefault(found[1], []).append(rank)
    if not waiting:
        return None
    who = joined([f"{ranks_text(ranks)} in {op}" for op, ranks in waiting.items()])
    return failed(
        f"it does not end: your function waits on {who}, and not all ranks of that world come there"
    )
