"""The exercise on losses: ranks with different numbers of samples, in the library's DDP."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from course_lib.classroom.checks.meeting import hang, meeting
from course_lib.classroom.checks.runs import RunExercise, Wrong, it_raised, it_returned, run
from course_lib.classroom.checks.verdict import Verdict, failed, joined, plural
from course_lib.comm.communicator import Communicator
from course_lib.parallel.ddp import FlatDDP
from course_lib.parallel.ddp.weighting import weighted_loss
from course_lib.runtime.errors import LaunchError

_CLOSE = 1e-5  # a factor computed in float32 is right, too
Held = tuple[tuple[float, ...], ...]
"""The losses of each rank's samples."""

CASES: tuple[Held, ...] = (
    ((0.5, 0.25, 3.0),),
    ((4.0,), (1.0, 1.0, 1.0)),
    ((3.0, 5.0), (2.0, 8.0)),
    ((2.0, 6.0), (), (1.0, 9.0, 7.0)),
    ((5.0, 1.0, 2.0, 8.0), (), (3.0,), ()),
)


@dataclass
class Outcome:
    """Of one case on one rank: the gradient after DDP's backward, and the loss that the function returned."""

    gradient: float
    loss: float


class _Times(nn.Module):
    """weight · sample with a weight of 1: a sample is its own loss, and its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.weight * samples


def _train(comm: Communicator, fn: Callable[..., Any], cases: list[Held]) -> list[Outcome]:
    meet = meeting(comm)
    return [_step(comm, meet, fn, held) for held in cases]


def _step(comm: Communicator, meet: Communicator, fn: Callable[..., Any], held: Held) -> Outcome:
    meet.barrier()
    model, mine = FlatDDP(_Times(), comm), held[comm.rank]
    loss_sum = model(torch.tensor(mine, dtype=torch.float64)).sum()
    try:
        loss = fn(comm, loss_sum, len(mine))
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(f"{it_raised(error)} {_where(held)}") from error
    meet.barrier()  # on a connection of its own: whoever sent too little waits here, not in the next message
    if not isinstance(loss, torch.Tensor):
        raise Wrong(
            f"{it_returned(loss)}; expected the loss, a tensor, so that backward() can run {_where(held)}"
        )
    if loss.numel() != 1 or not loss.requires_grad:
        what = (
            f"has shape {tuple(loss.shape)}" if loss.numel() != 1 else "knows nothing of the model any more"
        )
        raise Wrong(
            f"the tensor that your function returned {what}: expected a scalar computed from loss_sum, so that "
            f"backward() reaches the parameters {_where(held)}"
        )
    loss.backward()
    (weight,) = model.module.parameters()
    assert weight.grad is not None
    return Outcome(weight.grad.item(), loss.item())


class WeightedLoss(RunExercise):
    """f(comm, loss_sum, count) -> the loss on which DDP's backward gives the whole batch's gradient."""

    def judge(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        # A launch for each world: in it torch.distributed's own calls mean the same ranks as `comm`.
        for world_size, group in itertools.groupby(CASES, key=len):
            cases = list(group)
            results = run(_train, fn, cases, world_size=world_size, timeout=timeout)
            for number, held in enumerate(cases):
                outcomes = [outcomes[number] for outcomes in results]
                text = _problem(held, outcomes)
                if text:
                    lines = [f"rank {rank}: returned {one.loss:g}" for rank, one in enumerate(outcomes)]
                    return failed(f"{text} {_where(held)}", lines)
        text = (
            f"passed: {len(CASES)} batches on 1, 2, 3 and 4 ranks, some ranks without a sample: DDP's "
            "gradient is that of the mean over all samples, and a loss of 4 beside three of 1 gives 1.75"
        )
        return Verdict(passed=True, attempted=True, text=text)

    def ending(self, error: LaunchError) -> Verdict:
        return hang(error) or super().ending(error)


def _problem(held: Held, outcomes: list[Outcome]) -> str:
    samples = [sample for some in held for sample in some]
    right, got = sum(samples) / len(samples), outcomes[0].gradient
    if not abs(got - right) < _CLOSE:
        hint = _recognise(held, got)
        return f"wrong gradient: {got:g} where the mean over all samples is {right:g}{': ' if hint else ''}{hint}"
    mean = sum(one.loss for one in outcomes) / len(outcomes)
    if mean != mean:
        return "right gradient, but a rank without samples divides 0 by 0, and returned NaN"
    if not abs(mean - right) < _CLOSE:
        return (
            f"right gradient, but the mean of the ranks' losses is {mean:g} where all samples have {right:g}: did an "
            "all-reduce write into loss_sum itself?"
        )
    return ""


def _recognise(held: Held, got: float) -> str:
    if got != got and not all(held):
        return "a rank without samples divides 0 by 0, and its NaN is added to everybody's gradient"
    sums, counts, N = [sum(some) for some in held], [len(some) for some in held], len(held)
    total = sum(counts)
    means = [s / n for s, n in zip(sums, counts, strict=True) if n]
    weighted = sum(s * n for s, n in zip(sums, counts, strict=True))
    mean = sum(sums) / total
    known = [
        (
            sums[0] if N == 1 else math.nan,
            "that is the sum of the losses: loss_sum is a sum already, so it needs no weight; divide it by the number "
            "of all samples",
        ),
        (
            sum(means) / N,
            "that is the mean of the ranks' means: a sample of a small rank counts more than another",
        ),
        (sum(means) / len(means), "that is the mean of the means of those ranks that have samples"),
        (
            mean / N,
            f"that is {N} times too small: DDP divides the sum of the ranks' gradients by {N}, so the loss must be "
            "comm.world_size times as large",
        ),
        (mean * N, f"that is {N} times too large"),
        (
            sum(sums) / N,
            "that is the sum of the losses over the number of ranks; nothing divides by the samples",
        ),
        (weighted / total, "loss_sum is a sum already, but it was weighted with the count once more"),
        (weighted / total / N, "loss_sum is a sum already, but it was weighted with the count once more"),
    ]
    return next((what for value, what in known if abs(value - got) < _CLOSE), "")


def _where(held: Held) -> str:
    texts = ["[" + ", ".join(f"{sample:g}" for sample in some) + "]" for some in held]
    return f"({plural(len(held), 'rank')} with the losses {joined(texts)})"


EXERCISE = WeightedLoss("weighted_loss", "comm, loss_sum, count", weighted_loss)
