"""Two things the ranks do together around a snapshot: hand theirs to all, and hear what rank 0 did on its disk.

Only rank 0 touches the disk. If every rank read its own copy, one node could resume from another step than the rest,
and nothing would say so; and only rank 0 needs to see the directory.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from course_lib.comm.communicator import Communicator
from course_lib.comm.together import broadcast_bytes

DONE, NOTHING, FAILED = range(3)


def gather_objects(comm: Communicator, mine: Any) -> list[Any]:
    """Every rank's object, in rank order, on every rank."""
    everyone: list[Any] = [None] * comm.world_size
    dist.all_gather_object(everyone, mine, group=comm.group)
    return everyone


def broadcast_outcome(comm: Communicator, kind: int, data: bytes) -> tuple[int, bytes]:
    """Rank 0's `kind` and bytes, on every rank. What the other ranks give is not looked at."""
    outcome = broadcast_bytes(comm, bytes([kind]) + data)
    return outcome[0], outcome[1:]
