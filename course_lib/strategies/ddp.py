"""The rungs of DDP, and PyTorch's own on the same steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib.comm.communicator import Communicator
from course_lib.parallel.ddp import BucketedDDP, FlatDDP, PerParameterDDP
from course_lib.parallel.sync_batch_norm import SyncBatchNorm
from course_lib.plan.partition import chunk_bounds
from course_lib.strategies.common import Loss, MakeOptimizer, Way, broadcast_state, copied


class DataParallelRanks(Way):
    """Each rank computes the gradient of its slice; the wrapper that `wrap` makes averages them during backward.

    A slice's mean loss counts with its share of the whole batch, so uneven and empty slices are right. Each slice is
    worked through in `accumulate` pieces, all but the last inside `no_sync`.

    sync_batch_norm: normalise over the ranks' pieces together: the model's BatchNorms are converted, in place. Without
        it BatchNorm sees one slice.
    options: the wrapper's. `find_unused_parameters` is on unless you say otherwise: a strategy takes any model.
    """

    def __init__(
        self,
        wrap: Callable[..., nn.Module],
        model: nn.Module,
        comm: Communicator,
        optimizer: MakeOptimizer,
        *,
        loss_fn: Loss = F.cross_entropy,
        clip_norm: float | None = None,
        accumulate: int = 1,
        sync_batch_norm: bool = True,
        **options: Any,
    ) -> None:
        model = SyncBatchNorm.convert(model, comm) if sync_batch_norm else model
        super().__init__(model, comm, optimizer, loss_fn=loss_fn, clip_norm=clip_norm, accumulate=accumulate)
        self.wrapped: Any = wrap(model, comm, **{"find_unused_parameters": True} | options)
        self.optimizer = self.make_optimizer(model.parameters())

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.check_batch(inputs, targets)
        self.optimizer.zero_grad()
        start, stop = chunk_bounds(len(inputs), self.comm.world_size)[self.comm.rank]
        mine, wanted = inputs[start:stop], targets[start:stop]
        total = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        pieces = chunk_bounds(stop - start, self.accumulate)
        for number, (first, last) in enumerate(pieces, start=1):
            # The wrapper divides by the number of ranks; so the weights of all pieces on all ranks add up to that.
            weight = (last - first) / len(inputs) * self.comm.world_size
            with nullcontext() if number == len(pieces) else self.wrapped.no_sync():
                loss = self._loss(mine[first:last], wanted[first:last], weight)
                loss.backward()
            total += loss.detach() / self.comm.world_size
        self.optimizer.step()
        self.comm.all_reduce(total)
        return total.item()

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor, weight: float) -> torch.Tensor:
        outputs = self.wrapped(inputs)
        if not len(inputs):  # the mean of nothing is not a number; but this rank must take part in backward
            return outputs.sum()
        return self.loss_fn(outputs, targets) * weight

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The same on every rank; without `sync_batch_norm`, BatchNorm's statistics are rank 0's."""
        return broadcast_state(self.comm, copied(self.model.state_dict()))


def torch_ddp(module: nn.Module, comm: Communicator, **options: Any) -> DistributedDataParallel:
    """PyTorch's own wrapper on the Communicator's group and device."""
    device_ids = [comm.device] if comm.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids, process_group=comm.group, **options)


DDP_STRATEGIES = {
    "ddp_per_parameter": partial(DataParallelRanks, PerParameterDDP),
    "ddp_flat": partial(DataParallelRanks, FlatDDP),
    "ddp_bucketed": partial(DataParallelRanks, BucketedDDP),
    "ddp_torch": partial(DataParallelRanks, torch_ddp),
}
