"""Broadcasts of bytes and of many tensors, on 1 to 4 real ranks."""

from __future__ import annotations

import pytest
import torch

from course_lib.comm.together import broadcast_bytes, broadcast_tensors


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_of_the_root_on_every_rank(ranks, world_size: int) -> None:
    def run(comm):
        root = comm.world_size - 1
        mine = f"rank {comm.rank}".encode() * (comm.rank + 57)
        return broadcast_bytes(comm, mine, root), broadcast_bytes(
            comm, b"" if comm.rank == 0 else b"not looked at"
        )

    root = world_size - 1
    for long, empty in ranks.run(world_size, run):
        assert long == f"rank {root}".encode() * (root + 57) and empty == b""


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tensors_of_all_kinds_in_one_broadcast(ranks, world_size: int) -> None:
    def run(comm):
        tensors = [
            torch.full((3,), comm.rank, dtype=torch.bool),
            torch.full((5, 7), comm.rank + 0.5).t(),  # strided
            torch.tensor(comm.rank),  # int64, no dimension
            torch.full((3,), comm.rank, dtype=torch.bfloat16),
            torch.empty(0),
            torch.full((2, 1), comm.rank, dtype=torch.float64),
        ]
        comm.ledger.clear()
        broadcast_tensors(comm, tensors, comm.world_size - 1)
        broadcast_tensors(comm, [])
        return tensors, len(comm.ledger)

    root = world_size - 1
    for tensors, num_broadcasts in ranks.run(world_size, run):
        assert num_broadcasts == 1
        wanted = [bool(root), root + 0.5, root, root, None, root]
        assert all(
            (tensor == value).all() for tensor, value in zip(tensors, wanted, strict=True) if tensor.numel()
        )


def test_a_tensor_that_autograd_kept_may_be_broadcast_and_its_backward_sees_the_new_values(ranks) -> None:
    def run(comm):
        weight, buffer = torch.ones(2, requires_grad=True), torch.full((2,), comm.rank + 1.0)
        product = (weight * buffer).sum()
        broadcast_tensors(comm, [buffer])
        product.backward()
        return buffer.tolist(), weight.grad.tolist()

    assert ranks.run(2, run) == [([1.0, 1.0], [1.0, 1.0])] * 2
