"""Comm hooks: what happens to a full bucket.

A hook gets the Communicator and the bucket's flat gradient, already divided by the number of ranks, starts its sum over
the ranks, and returns something whose `wait()` returns when the sum stands in the bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from course_lib.comm.communicator import Communicator


class Pending(Protocol):
    def wait(self) -> Any: ...


CommHook = Callable[[Communicator, torch.Tensor], Pending]


def all_reduce_hook(comm: Communicator, flat: torch.Tensor) -> Pending:
    """The sum, as it is. Each rank sends 2(N-1)/N times the bucket's bytes."""
    handle = comm.all_reduce(flat, async_op=True)
    assert handle is not None
    return handle


def bf16_compress_hook(comm: Communicator, flat: torch.Tensor) -> Pending:
    """The sum in bfloat16: half the bytes of float32, 8 bits of precision instead of 24, the same range."""
    return _Compressed(comm, flat)


class _Compressed:
    def __init__(self, comm: Communicator, flat: torch.Tensor) -> None:
        self.flat, self.short = flat, flat.to(torch.bfloat16)
        self.handle = all_reduce_hook(comm, self.short)

    def wait(self) -> None:
        self.handle.wait()
        self.flat.copy_(self.short)
