"""What the strategies share: the face, clipping, accumulation, copies of the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.comm.communicator import Communicator
from course_lib.comm.together import broadcast_tensors
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


class Way:
    """What every strategy is given, kept; `make_optimizer` makes one that clips. The package says what is what."""

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
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            raise ValueError(f"accumulate: expected 1 piece or more, got {accumulate!r}")
        if clip_norm is not None and not (isinstance(clip_norm, Real) and 0 < clip_norm < math.inf):
            raise ValueError(
                f"clip_norm: expected a norm above 0, or None for no clipping, got {clip_norm!r}"
            )
        if not callable(loss_fn):
            raise TypeError(f"loss_fn: expected a function of (outputs, targets), got {loss_fn!r:.60}")
        self.model, self.comm, self.loss_fn, self.accumulate = model, comm, loss_fn, accumulate
        self.make_optimizer = clipped(optimizer, clip_norm)

    def check_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Raises ValueError, on every rank, for a batch that cannot be trained on."""
        if not len(inputs) or len(inputs) != len(targets):
            raise ValueError(
                f"rank {self.comm.global_rank}: expected the whole batch on every rank, with a target for each input; "
                f"got {len(inputs)} inputs and {len(targets)} targets"
            )


def backward_in_pieces(
    forward: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_fn: Loss,
    num_pieces: int,
) -> float:
    """Add the gradient of the batch's mean loss to the parameters', a piece of the batch at a time; return the loss.

    The pieces may differ in length, so each counts with its share of the samples: the mean of their means would be
    another number. Fewer samples than pieces make fewer pieces.
    """
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
    broadcast_tensors(comm, state.values(), root)
    return state
