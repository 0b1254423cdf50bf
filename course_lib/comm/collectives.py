"""How N ranks combine their tensors, built from messages alone.

    naive          everybody sends to rank 0, which adds and sends back: its link carries 2(N-1)·S
    tree           a reduce and a broadcast along a binary tree: 2·log2(N) steps of S
    ring           a reduce-scatter and an all-gather: 2(N-1) steps of S/N, every link equally busy
    hierarchical   rings inside each host and, with 1/L of the tensor, across the hosts

N ranks, S bytes in the tensor, L ranks on a host. `plan.traffic` says exactly what each rank sends; the tests
hold the ledger against it. All of them have in common:

* the result is bit for bit the same on all ranks: each element is reduced along one path and then copied;
* any length (not divisible by N, shorter than N, 0), any strides, N = 1; float32, float64, bfloat16, float16,
  int64, int32;
* sums are made in the tensor's own dtype, and AVG divides once, after the last addition, by N;
* they block, and every rank of `comm` must call them with the same length, dtype and reduction: the board
  sees a mismatch before a byte moves.

The naive one is in this file; `tree.py`, `ring.py` and `hierarchical.py` hold the others, with their sources.
"""

from __future__ import annotations

from typing import Any

import torch

from course_lib.comm.communicator import Communicator
from course_lib.comm.hierarchical import hierarchical_all_reduce
from course_lib.comm.ops import AVG, MAX, MIN, PRODUCT, SUM, average_, check_op, combine
from course_lib.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from course_lib.comm.tree import broadcast, reduce, tree_all_reduce
from course_lib.comm.views import flat_view

__all__ = [
    "AVG",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "broadcast",
    "hierarchical_all_reduce",
    "naive_all_reduce",
    "reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_all_reduce",
]


def naive_all_reduce(comm: Communicator, tensor: torch.Tensor, op: Any = SUM) -> None:
    """Reduce `tensor` over all ranks, in place: everybody sends to rank 0, which adds and sends back.

    Rank 0 sends and receives (N-1)·S bytes, every other rank S.
    """
    name = check_op(op, tensor)
    with flat_view(comm, "naive_all_reduce", tensor, name) as flat:
        if comm.rank > 0:
            comm.send(flat, 0)
            comm.recv(flat, 0)
            return
        part = torch.empty_like(flat)
        for source in range(1, comm.world_size):
            comm.recv(part, source)
            combine(name, flat, part, out=flat)
        average_(name, flat, comm.world_size)
        for to in range(1, comm.world_size):
            comm.send(flat, to)
