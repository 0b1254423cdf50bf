"""Every way to train behind one face.

    strategy = build("data_parallel", model, comm, optimizer)
    loss = strategy.step(inputs, targets)       # on every rank, with the same whole batch
    state = strategy.full_state_dict()          # on every rank, the whole model

So one test, one bench and one training program serve all of them. Each rank is handed the whole batch and takes
its own part; the loss is the whole batch's mean on every rank, and after a step the model is what one process
would have made of the batch.

What every strategy takes, beside its own options:

model: trained in place, as far as this rank holds it. The same on every rank.
optimizer: a callable from parameters to a torch optimizer.
loss_fn: (outputs, targets) -> the *mean* over the samples of dimension 0. A part of the batch counts with its
    share of the samples.
clip_norm: before the update, scale the whole gradient down to this norm where it is longer.
accumulate: work through a rank's part of the batch in so many pieces, adding up gradients; still one update.

To add a way to train: a class with `step` and `full_state_dict`, and a line in `STRATEGIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.comm.communicator import Communicator
from course_lib.parallel.data_parallel import DataParallel
from course_lib.parallel.parameter_server import ParameterServer
from course_lib.plan.partition import chunk_bounds

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Strategy(Protocol):
    """The face."""

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Train on one batch: the whole batch, the same on every rank. Returns its mean loss before the update."""
        ...

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The unsharded model's, with the keys of the model that was given; a copy, on every rank."""
        ...


def build(
    name: str, model: nn.Module, comm: Communicator, optimizer: MakeOptimizer, **options: Any
) -> Strategy:
    """The strategy `name` (see `STRATEGIES`) on this rank; `options` are its keyword arguments.

    Raises ValueError for an unknown name, TypeError for an unknown option.
    """
    if name not in STRATEGIES:
        raise ValueError(f"name: expected one of {', '.join(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name](model, comm, optimizer, **options)


class Single:
    """One process, no communication: every rank trains on the whole batch by itself, and all get the same."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        optimizer: MakeOptimizer,
        *,
        loss_fn: Loss = F.cross_entropy,
        clip_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        self.model, self.comm = model, comm
        self.optimizer = clipped(optimizer, clip_norm)(model.parameters())
        self.loss_fn, self.accumulate = loss_fn, accumulate

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = backward_in_pieces(self.model, inputs, targets, self.loss_fn, self.accumulate)
        self.optimizer.step()
        return loss

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return copied(self.model.state_dict())


class SynchronousServer:
    """A parameter server: every rank computes the gradient of its slice, rank `server` adds up and updates.

    aggregate, server: see `ParameterServer`. A rank whose slice is empty sends no gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        optimizer: MakeOptimizer,
        *,
        loss_fn: Loss = F.cross_entropy,
        clip_norm: float | None = None,
        accumulate: int = 1,
        **options: Any,
    ) -> None:
        self.model, self.comm = model, comm
        self.server = ParameterServer(model, comm, clipped(optimizer, clip_norm), **options)
        self.loss_fn, self.accumulate = loss_fn, accumulate

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
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
        **options: Any,
    ) -> None:
        super().__init__(model, comm, optimizer, **options)
        self.device_ids = device_ids or _devices_from(comm)
        if comm.rank == 0:
            self.model = DataParallel(model, self.device_ids)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
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


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "single": Single,
    "parameter_server": SynchronousServer,
    "data_parallel": OneProcessDataParallel,
}
"""name -> what makes it, called as `build` says."""


# --- what strategies share


def backward_in_pieces(
    forward: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_fn: Loss,
    num_pieces: int,
) -> float:
    """Add the gradient of the batch's mean loss to the parameters', a piece of the batch at a time; return the loss.

    The pieces may differ in length, so each counts with its share of the samples: the mean of their means would be
    another number. Fewer samples than pieces make fewer pieces. Raises ValueError for fewer than one.
    """
    if num_pieces < 1:
        raise ValueError(f"accumulate: expected 1 piece or more, got {num_pieces}")
    total, pieces = 0.0, chunk_bounds(len(inputs), max(1, min(num_pieces, len(inputs))))
    for start, stop in pieces:
        loss = loss_fn(forward(inputs[start:stop]), targets[start:stop])
        if len(pieces) > 1:
            loss = loss * ((stop - start) / len(inputs))
        loss.backward()
        total += loss.item()
    return total


def clipped(optimizer: MakeOptimizer, clip_norm: float | None) -> MakeOptimizer:
    """Makes the same optimizer, which before each update scales the gradients to a norm of at most `clip_norm`.

    For ways to train in which the whole gradient is in one place when the update begins.
    """

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        made = optimizer(parameters)
        if clip_norm is not None:

            def clip(*_: Any) -> None:
                nn.utils.clip_grad_norm_(parameters, clip_norm)

            made.register_step_pre_hook(clip)
        return made

    return make


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def broadcast_state(
    comm: Communicator, state: dict[str, torch.Tensor], root: int = 0
) -> dict[str, torch.Tensor]:
    """Rank `root`'s state in every rank's tensors, which are written over."""
    for tensor in state.values():
        comm.broadcast(tensor, root)
    return state


def _devices_from(comm: Communicator) -> list[int | str | torch.device]:
    """One device for each rank, `comm`'s own first."""
    if comm.device.type == "cpu":
        return ["cpu"] * comm.world_size
    first, count = comm.device.index or 0, torch.accelerator.device_count()
    return [torch.device(comm.device.type, (first + i) % count) for i in range(comm.world_size)]
