"""Ranks with different numbers of batches.

A rank that has run out of data leaves its loop, and the others wait for it in their next all-reduce for ever. Inside a
Join it stays instead, and answers each step of the others with zeros, until nobody has data left.

Before each step all ranks tell each other who still trains: N bytes more in each step. At the end the parameters and
buffers of a rank that trained to the last step are broadcast, since those that stopped early have not updated theirs.
Optimizer state is not: make a new optimizer, or save it on a rank that was among the last.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from course_lib.comm.together import broadcast_tensors

if TYPE_CHECKING:
    from course_lib.parallel.ddp.base import DDP


class Join:
    """`with model.join(): ...` around the loop over this rank's batches.

    divide_by_initial_world_size: True: the gradient is the sum divided by the number of ranks, so a batch counts the
        same in every step. False: divided by the number of ranks that still have data, as if the others had never
        been there.

    One model at a time, and one forward for each backward: what a rank without data answers is one step.

    `num_active`: how many ranks had a batch in the last step.
    """

    def __init__(self, model: DDP, divide_by_initial_world_size: bool = True) -> None:
        self.model, self.comm = model, model.comm
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.active: list[int] = list(range(self.comm.world_size))

    @property
    def num_active(self) -> int:
        return len(self.active)

    def __enter__(self) -> Join:
        if self.model._join is not None:
            raise RuntimeError(
                f"rank {self.comm.global_rank}: join(): the model is inside a join already; use one around the loop"
            )
        self.model._join = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        last = self.active
        try:
            while kind is None and self._who_trains(mine=False):
                last = self.active
                self._set_divisor()
                self.model.shadow(last[0])
            if kind is None:
                module = self.model.module
                broadcast_tensors(self.comm, [*module.parameters(), *module.buffers()], last[0])
        finally:
            self.model._join = None
            self.active = last
            self.model.num_contributing = self.comm.world_size

    def announce(self) -> int:
        """This rank has another batch. Returns the lowest rank that has one: its buffers count in this step."""
        self._who_trains(mine=True)
        self._set_divisor()
        return self.active[0]

    def _who_trains(self, mine: bool) -> list[int]:
        flags = torch.zeros(self.comm.world_size, dtype=torch.uint8, device=self.comm.device)
        flags[self.comm.rank] = mine
        self.comm.all_reduce(flags, "max")
        self.active = flags.nonzero().flatten().tolist()
        return self.active

    def _set_divisor(self) -> None:
        if not self.divide_by_initial_world_size:
            self.model.num_contributing = len(self.active)
