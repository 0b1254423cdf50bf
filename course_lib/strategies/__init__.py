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

from collections.abc import Callable
from typing import Any

from torch import nn

from course_lib.comm.communicator import Communicator
from course_lib.strategies.common import MakeOptimizer, Strategy
from course_lib.strategies.ddp import DDP_STRATEGIES
from course_lib.strategies.one_process import OneProcessDataParallel, Single
from course_lib.strategies.server import SynchronousServer

__all__ = ["STRATEGIES", "MakeOptimizer", "Strategy", "build"]

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "single": Single,
    "parameter_server": SynchronousServer,
    "data_parallel": OneProcessDataParallel,
    **DDP_STRATEGIES,
}
"""name -> what makes it, called as `build` says."""


def build(
    name: str, model: nn.Module, comm: Communicator, optimizer: MakeOptimizer, **options: Any
) -> Strategy:
    """The strategy `name` (see `STRATEGIES`) on this rank; `options` are its keyword arguments.

    Raises ValueError for an unknown name, TypeError for an unknown option.
    """
    if name not in STRATEGIES:
        raise ValueError(f"name: expected one of {', '.join(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name](model, comm, optimizer, **options)
