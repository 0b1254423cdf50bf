"""A server that adds up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from course_lib.comm.communicator import Communicator
from course_lib.parallel.parameter_server import ParameterServer
from course_lib.parallel.parameter_server.synchronous import Aggregate
from course_lib.plan.partition import chunk_bounds
from course_lib.strategies.common import MakeOptimizer, Way, backward_in_pieces, broadcast_state, copied


class SynchronousServer(Way):
    """A parameter server: every rank computes the gradient of its slice, rank `server` adds up and updates.

    aggregate, server: see `ParameterServer`. A rank whose slice is empty sends no gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        optimizer: MakeOptimizer,
        *,
        aggregate: Aggregate | None = None,
        server: int = 0,
        **shared: Any,
    ) -> None:
        super().__init__(model, comm, optimizer, **shared)
        self.server = ParameterServer(model, comm, self.make_optimizer, aggregate, server)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.check_batch(inputs, targets)
        start, stop = chunk_bounds(len(inputs), self.comm.world_size)[self.comm.rank]
        mine = inputs[start:stop], targets[start:stop]
        loss = math.nan
        if stop > start:
            loss = backward_in_pieces(self.model, *mine, self.loss_fn, self.accumulate)
        self.server.push(stop - start, loss)
        return self.server.pull()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The server's; the other ranks' differ in the buffers that forward writes, such as BatchNorm's."""
        return broadcast_state(self.comm, copied(self.model.state_dict()), self.server.server)
