"""The exercises of the chapter on data parallelism: an aggregation, the sharded server, a bound on staleness."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from course_lib.classroom.checks.cases import Case, Placed
from course_lib.classroom.checks.conductor import conduct
from course_lib.classroom.checks.exercises import Call, Exercise
from course_lib.classroom.checks.runs import RunExercise, Wrong, it_raised, it_returned, run
from course_lib.classroom.checks.verdict import Verdict, failed, joined, plural
from course_lib.comm.communicator import Communicator
from course_lib.parallel.parameter_server import ParameterServer, may_pull, sharded_step, weighted_mean
from course_lib.plan.partition import chunk_bounds, chunk_sizes
from course_lib.plan.traffic import Bytes

_RATE = 0.5  # a learning rate that loses no bits

# --- the sharded server: like the collectives, judged case by case


class ShardedStep(Exercise):
    """f(comm, parameters, gradient, learning_rate): in place in `parameters`."""

    def cases(self, world_size: int, with_op: bool) -> list[Case]:
        lengths = [Case(length) for length in (12, 7, 2, 1, 0, 1857)]
        return [*lengths, Case(5, torch.float64)]

    def prepare(self, case: Case, rank: int, world_size: int) -> Call:
        parameters, gradient = Placed(self._parameters(case).to(case.dtype)), Placed(case.of_rank(rank))
        kept = {"gradient": (gradient.tensor, gradient.tensor.clone())}
        return Call(
            (parameters.tensor, gradient.tensor, _RATE), parameters.tensor, [parameters, gradient], kept
        )

    def _parameters(self, case: Case) -> torch.Tensor:
        return 10_000 + 3 * torch.arange(case.length, dtype=torch.float64)

    def expected(self, case: Case, rank: int, world_size: int) -> torch.Tensor:
        return self._parameters(case) - _RATE * case.reduced(world_size)

    def traffic(self, case: Case, world_size: int) -> tuple[list[Bytes], list[int]]:
        sizes = chunk_sizes(case.length, world_size)
        each = [case.itemsize * (case.length - size + (world_size - 1) * size) for size in sizes]
        if world_size == 1:
            each = [0]
        return [Bytes(one, one) for one in each], [2 * (world_size - 1)] * world_size


# --- the aggregation

_LOSSES = (0.3, 0.2, 0.8)


class _Times(nn.Module):
    """weight · sample: the gradient of the mean of its outputs is the mean of the samples."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return samples * self.weight


def _aggregate(comm: Communicator, fn: Callable[..., Any], batches: list[torch.Tensor]) -> list[torch.Tensor]:
    return [_aggregate_once(comm, fn, batch) for batch in batches]


def _aggregate_once(comm: Communicator, fn: Callable[..., Any], samples: torch.Tensor) -> torch.Tensor:
    """One step of the library's server with the learner's aggregation; the gradient that came out."""
    module = _Times(samples.shape[1], samples.dtype)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    server = ParameterServer(module, comm, sgd, aggregate=partial(_watched, fn))
    server.step(samples, samples, lambda outputs, targets: outputs.sum(dim=1).mean())
    return -module.weight.detach()


def _watched(fn: Callable[..., Any], gradients: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    copies, numbers = [gradient.clone() for gradient in gradients], list(counts)
    where = f"({plural(len(counts), 'gradient')}, of {joined([str(count) for count in numbers])} samples)"
    try:
        result = fn(gradients, counts)
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(f"{it_raised(error)} {where}") from error
    like = copies[0]
    if not isinstance(result, torch.Tensor):
        raise Wrong(f"{it_returned(result)}, where one flat tensor is needed {where}")
    if (result.shape, result.dtype) != (like.shape, like.dtype):
        got, want = (
            f"shape {tuple(one.shape)} and {str(one.dtype).removeprefix('torch.')}" for one in (result, like)
        )
        raise Wrong(f"your function returned a tensor of {got}, where the gradients are of {want} {where}")
    if list(counts) != numbers or not all(map(torch.equal, gradients, copies)):
        raise Wrong(f"your function changed what it was given: the gradients and counts must stay {where}")
    return result


class _OnTheServer(RunExercise):
    """A function that the server calls."""

    endless: ClassVar[str] = f"{RunExercise.endless}, and everybody waits for the server"


class Aggregation(_OnTheServer):
    """f(gradients, counts) -> gradient: that of the mean over all samples, however they are shared out."""

    def judge(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        three = torch.tensor([[loss] for loss in _LOSSES])
        five = torch.tensor([[7.0, -1, 4], [2, 9, -6], [5, 3, 8], [-4, 6, 1], [11, -8, 10]]).double()
        for world_size in (1, 2, 3, 4):
            got = run(_aggregate, fn, [three, five], world_size=world_size, timeout=timeout)[0]
            for samples, gradient in zip((three, five), got, strict=True):
                text = _wrong_gradient(samples, world_size, gradient.double())
                if text:
                    return failed(text)
        text = (
            "passed: losses of 0.3, 0.2 and 0.8 give 0.433 on 1, 2, 3 and 4 ranks, and five samples of three numbers "
            "each their mean"
        )
        return Verdict(passed=True, attempted=True, text=text)


def _wrong_gradient(samples: torch.Tensor, world_size: int, got: torch.Tensor) -> str:
    right, samples = samples.double().mean(dim=0), samples.double()
    wrong = ((got - right).abs() > 1e-5) | got.isnan()
    if not bool(wrong.any()):
        return ""
    at = int(wrong.nonzero()[0])
    slices = [samples[start:stop, at] for start, stop in chunk_bounds(len(samples), world_size)]
    held = joined([str([round(sample, 6) for sample in one.tolist()]) for one in slices])
    hint = _recognise([one for one in slices if len(one)], got[at].item())
    digits = ".3f" if f"{got[at]:.3f}" != f"{right[at]:.3f}" else ".7g"
    return (
        f"wrong gradient: {got[at]:{digits}} where the mean over all samples is {right[at]:{digits}}"
        f"{': ' if hint else ''}{hint} ({plural(world_size, 'rank')} with the samples {held})"
    )


def _recognise(slices: list[torch.Tensor], got: float) -> str:
    means, counts = [one.mean().item() for one in slices], [len(one) for one in slices]
    total, weighted = sum(counts), sum(len(one) * one.mean().item() for one in slices)
    known = {
        "the mean of the ranks' means, as if all slices were equally long": sum(means) / len(means),
        "the sum of the ranks' means": sum(means),
        "weighted with the counts, but never divided by the number of samples": weighted,
        "weighted with the counts, but divided by the number of ranks": weighted / len(means),
        "divided by the number of samples, but not weighted with the counts": sum(means) / total,
        "the gradient of the first rank alone": means[0],
        "the gradient of the last rank alone": means[-1],
    }
    return next((f"that is {what}" for what, value in known.items() if abs(value - got) < 1e-5), "")


# --- the bound


class Bound(_OnTheServer):
    """f(version, in_flight, bound) -> bool: whether one more worker may pull now."""

    def judge(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        outcomes = run(conduct, fn, world_size=4, timeout=timeout)[0]
        for outcome in outcomes:
            text = outcome.problem()
            if text:
                return failed(text, [f"staleness of the updates, in their order: {outcome.staleness}"])
        bounds = sorted({outcome.bound for outcome in outcomes})
        text = (
            f"passed: 3 workers, bounds {joined([str(bound) for bound in bounds])}, {len(outcomes)} runs: no "
            "update was staler than its bound, nobody waited for ever, and as many worked at once as the bound allows"
        )
        return Verdict(passed=True, attempted=True, text=text)


EXERCISES = (
    Aggregation("weighted_mean", "gradients, counts", weighted_mean),
    ShardedStep(
        name="sharded_step",
        arguments="parameters, gradient, learning_rate",
        solution=sharded_step,
        what="a sharded server",
        noun="parameters",
        per_rank="2*(N-1)/N*S",
        in_all="2*(N-1)*S",
        num_messages="2*(N-1)",
        same_everywhere=True,
        ranks_alike=False,
    ),
    Bound("may_pull", "version, in_flight, bound", may_pull),
)
