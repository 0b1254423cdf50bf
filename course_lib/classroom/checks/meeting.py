"""Where the grader meets the ranks of a launch, undisturbed by what a learner's function sends; and those that hang."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist

from course_lib.classroom.checks.verdict import Verdict, failed, joined
from course_lib.comm.communicator import Communicator
from course_lib.runtime.errors import LaunchError, RanksHung, ranks_text


def meeting(comm: Communicator) -> Communicator:
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
    return failed(f"it does not end: your function waits on {who}, and not all ranks come there")
