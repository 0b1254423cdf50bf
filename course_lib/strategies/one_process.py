"""One process that does all the work: on one device, or on several."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from course_lib.comm.communicator import Communicator
from course_lib.parallel.data_parallel import DataParallel
from course_lib.strategies.common import MakeOptimizer, Way, backward_in_pieces, broadcast_state, copied


class Single(Way):
    """One process, no communication: every rank trains on the whole batch by itself, and all get the same."""

    def __init__(self, model: nn.Module, comm: Communicator, optimizer: MakeOptimizer, **shared: Any) -> None:
        super().__init__(model, comm, optimizer, **shared)
        self.optimizer = self.make_optimizer(model.parameters())

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.check_batch(inputs, targets)
        self.optimizer.zero_grad()
        loss = backward_in_pieces(self.model, inputs, targets, self.loss_fn, self.accumulate)
        self.optimizer.step()
        return loss

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return copied(self.model.state_dict())


class OneProcessDataParallel(Single):
    """DataParallel on rank 0, with as many replicas as there are ranks.

    DataParallel knows no ranks: it is one process that drives all devices. So rank 0 drives `world_size` replicas, and
    the other ranks do nothing but receive the loss of each step (8 bytes) and, at the end, the state. They are there so
    that one launch compares all strategies, and lend no memory and no processor.

    device_ids: the replicas' devices. None: `world_size` times the CPU, or rank 0's GPU and those that follow it. Every
    piece of the batch needs a sample for each replica.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        optimizer: MakeOptimizer,
        *,
        device_ids: list[int | str | torch.device] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, comm, optimizer, **shared)
        self.device_ids = device_ids or _devices_from(comm)
        if comm.rank == 0:
            self.model = DataParallel(model, self.device_ids)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.check_batch(inputs, targets)
        # Checked on every rank, so that none waits in vain.
        if len(inputs) < len(self.device_ids) * self.accumulate:
            raise ValueError(
                f"rank {self.comm.rank}: inputs: a batch of {len(inputs)} is too small for {len(self.device_ids)} "
                f"replicas and accumulate={self.accumulate}: each replica needs a sample in each piece"
            )
        loss = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        if self.comm.rank == 0:
            loss.fill_(super().step(inputs, targets))
        self.comm.broadcast(loss)
        return loss.item()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return broadcast_state(self.comm, super().full_state_dict())


def _devices_from(comm: Communicator) -> list[int | str | torch.device]:
    """One device for each rank, `comm`'s own first."""
    if comm.device.type == "cpu":
        return ["cpu"] * comm.world_size
    first, count = comm.device.index or 0, torch.accelerator.device_count()
    return [torch.device(comm.device.type, (first + i) % count) for i in range(comm.world_size)]
