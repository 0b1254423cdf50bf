"""Solutions of the exercises that have no twin in the library: the first messages of chapter 00."""

from __future__ import annotations

import torch

from course_lib.comm.communicator import Communicator


def ping_pong(comm: Communicator, tensor: torch.Tensor, num_rounds: int) -> None:
    """Bounce `tensor` between ranks 0 and 1, `num_rounds` times, in place; rank 1 adds 1 each time. Others do nothing.

    Ranks 0 and 1 each send and receive `num_rounds` messages of the tensor's bytes.
    """
    if comm.world_size == 1 or comm.rank > 1:
        return
    for _ in range(num_rounds):
        if comm.rank == 0:
            comm.send(tensor, 1)
            comm.recv(tensor, 1)
        else:
            comm.recv(tensor, 0)
            tensor += 1
            comm.send(tensor, 0)


def pass_it_on(comm: Communicator, mine: torch.Tensor) -> list[float]:
    """The numbers of all ranks, in rank order, on every rank. `mine`: this rank's, a tensor of one element.

    Around a ring: N-1 exchanges, one number each. What arrives in step i comes from i ranks to the left.
    """
    N, rank = comm.world_size, comm.rank
    numbers = [mine.item()] * N
    passing = mine.clone()
    for step in range(1, N):
        received = torch.empty_like(passing)
        comm.exchange(passing, (rank + 1) % N, received, (rank - 1) % N)
        numbers[(rank - step) % N] = received.item()
        passing = received
    return numbers
