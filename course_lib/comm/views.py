"""How a collective looks at a tensor: in one dimension, cut into chunks, whatever its shape and strides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from course_lib.comm.communicator import Communicator
from course_lib.comm.messages import copy_back, describe
from course_lib.plan.partition import chunk_sizes


def chunks_of(flat: torch.Tensor, n: int) -> list[torch.Tensor]:
    return list(flat.split(chunk_sizes(flat.numel(), n)))


@contextmanager
def flat_view(comm: Communicator, name: str, tensor: torch.Tensor, *words: object) -> Iterator[torch.Tensor]:
    """Enter the collective `name`, with `tensor` in one dimension; what is written there reaches it."""
    comm.check_tensor(f"{name}(tensor)", tensor)
    with comm.collective(name, tensor, *words), dense_view(tensor) as flat:
        yield flat


@contextmanager
def dense_view(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """`tensor` in one dimension: its own memory where that is dense, else a copy that is copied back."""
    detached = tensor.detach()  # writing into a parameter is allowed here, as in torch's collectives
    dense = detached.contiguous()
    yield dense.view(-1)
    copy_back(dense, detached)


def check_chunk(comm: Communicator, argument: str, chunk: torch.Tensor, whole: torch.Tensor) -> None:
    comm.check_tensor(argument, chunk)
    comm.check_tensor(argument, whole)
    expected = chunk_sizes(whole.numel(), comm.world_size)[comm.rank]
    if chunk.numel() != expected or chunk.dtype != whole.dtype:
        raise ValueError(
            f"rank {comm.global_rank}: {argument}: expected {expected} x {whole.dtype}, this rank's chunk of "
            f"{describe(whole)} over {comm.world_size} ranks, got {describe(chunk)}"
        )
