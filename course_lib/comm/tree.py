"""Reduce and broadcast along a binary tree: few steps, each of the whole tensor.

A reduce pairs the ranks and lets one of each pair hand its tensor to the other, again and again, so that each
step halves the number of ranks that still hold a part of the sum: log2(N) steps. A broadcast is the same
backwards. For a small tensor, where a message's latency is all that counts, nothing needs fewer steps. For a
large one it wastes links: in the first step half of the ranks send, in the last step one does, and each time
it is all S bytes.

For N = 8 and root 0 (a reduce reads downwards; a broadcast upwards, with the arrows turned):

    0   1   2   3   4   5   6   7
    0 ← 1   2 ← 3   4 ← 5   6 ← 7      distance 1
    0 ←———— 2       4 ←———— 6          distance 2
    0 ←———————————— 4                  distance 4

This is the binomial tree of R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), which costs log2(N)·(α + S/β) each way.
"""

from __future__ import annotations

from typing import Any

import torch

from course_lib.comm.communicator import Communicator
from course_lib.comm.ops import SUM, average_, check_op, combine
from course_lib.comm.views import flat_view


def tree_all_reduce(comm: Communicator, tensor: torch.Tensor, op: Any = SUM) -> None:
    """Reduce `tensor` over all ranks, in place: to rank 0 along a binary tree, and back along the same tree.

    2·log2(N) steps, rounded up. Every rank exchanges S bytes with its parent and S with each child.
    """
    name = check_op(op, tensor)
    with flat_view(comm, "tree_all_reduce", tensor, name) as flat:
        _up_the_tree(comm, flat, 0, name)
        _down_the_tree(comm, flat, 0)


def reduce(comm: Communicator, tensor: torch.Tensor, root: int, op: Any = SUM) -> None:
    """Reduce `tensor` over all ranks along a binary tree.

    Only rank `root`'s `tensor` changes: it holds the result.
    """
    name = check_op(op, tensor)
    comm.check_root("reduce(root)", root)
    with flat_view(comm, "tree_reduce", tensor, name, "to", root) as flat:
        _up_the_tree(comm, flat if comm.rank == root else flat.clone(), root, name)


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int) -> None:
    """Copy rank `root`'s `tensor` into every rank's, in place, along a binary tree."""
    comm.check_root("broadcast(root)", root)
    with flat_view(comm, "tree_broadcast", tensor, "from", root) as flat:
        _down_the_tree(comm, flat, root)


def _up_the_tree(comm: Communicator, flat: torch.Tensor, root: int, name: str) -> None:
    """Halve the number of ranks that hold a part of the sum until only `root` is left.

    `place` counts from the root. At distance d = 1, 2, 4, … each odd multiple of d hands its part to the
    place d below. On ranks that are not the root, `flat` ends as some partial sum.
    """
    N, place = comm.world_size, (comm.rank - root) % comm.world_size
    part = torch.empty_like(flat)
    for distance in _powers_of_two(N):
        if place & distance:
            comm.send(flat, (comm.rank - distance) % N)
            return
        if place + distance < N:
            comm.recv(part, (comm.rank + distance) % N)
            combine(name, flat, part, out=flat)
    average_(name, flat, N)


def _down_the_tree(comm: Communicator, flat: torch.Tensor, root: int) -> None:
    """The same steps backwards, each in the other direction."""
    N, place = comm.world_size, (comm.rank - root) % comm.world_size
    for distance in reversed(_powers_of_two(N)):
        if place % (2 * distance) == distance:
            comm.recv(flat, (comm.rank - distance) % N)
        elif place % (2 * distance) == 0 and place + distance < N:
            comm.send(flat, (comm.rank + distance) % N)


def _powers_of_two(below: int) -> list[int]:
    return [1 << k for k in range((below - 1).bit_length())]
