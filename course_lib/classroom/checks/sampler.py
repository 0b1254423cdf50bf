"""The exercise on the sampler: every rank deals itself its share, and torch's sampler says which that is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

import torch

from course_lib.classroom.checks.runs import RunExercise, it_raised, it_returned, run
from course_lib.classroom.checks.sampler_judge import Answer, Deal, problem, show
from course_lib.classroom.checks.verdict import Verdict, failed
from course_lib.comm.communicator import Communicator
from course_lib.parallel.sampler import sampler_indices

_WORLDS = (1, 2, 3, 4)
_PROCESSES = 2
DEALS = (
    *(Deal(12, n) for n in _WORLDS),
    Deal(10, 3),
    Deal(10, 4),
    Deal(10, 3, drop_last=True),
    Deal(10, 4, drop_last=True),
    Deal(3, 7),
    Deal(3, 7, drop_last=True),
    Deal(1, 4),
    *(Deal(12, n, shuffle=True) for n in _WORLDS),
    *(Deal(57, n, shuffle=True, seed=3, epoch=epoch) for epoch in (0, 1) for n in _WORLDS),
    *(Deal(57, n, shuffle=True, drop_last=True, seed=3, epoch=2) for n in _WORLDS),
    Deal(2048, 3, shuffle=True, epoch=5),
)


def _deal(comm: Communicator, fn: Callable[..., Any]) -> list[dict[int, Answer]]:
    """The answers of this process, deal by deal; it plays every world_size-th rank."""
    torch.manual_seed(1000 + comm.rank)  # as in a training, where each rank drops out other values
    mine = lambda deal: range(comm.rank, deal.num_replicas, comm.world_size)
    return [{rank: _answer(fn, deal, rank) for rank in mine(deal)} for deal in DEALS]


def _answer(fn: Callable[..., Any], deal: Deal, rank: int) -> Answer:
    before = torch.get_rng_state()
    try:
        result = fn(deal.length, deal.num_replicas, rank, **deal.options)
        if hasattr(result, "tolist"):  # a tensor, or a numpy array
            result = result.tolist()
        if isinstance(result, Iterator | range):
            result = list(itertools.islice(result, 10 * deal.length))
    except NotImplementedError:
        raise
    except Exception as error:
        return Answer([], it_raised(error))
    if not isinstance(result, list | tuple):
        return Answer([], f"{it_returned(result)}; expected a list of indices")
    odd = [one for one in result if isinstance(one, bool) or not isinstance(one, Integral)]
    if odd:
        return Answer(
            [], f"your function returned a list that holds a {type(odd[0]).__name__}; expected whole numbers"
        )
    return Answer([int(one) for one in result], moved=not torch.equal(before, torch.get_rng_state()))


class SamplerExercise(RunExercise):
    """f(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last) -> list of indices."""

    def judge(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        results = run(_deal, fn, world_size=_PROCESSES, timeout=timeout)
        for number, deal in enumerate(DEALS):
            answers = [results[rank % _PROCESSES][number][rank] for rank in range(deal.num_replicas)]
            text = problem(deal, answers)
            if text:
                dealt = [f"rank {rank}: {show(one.indices)}" for rank, one in enumerate(answers)]
                return failed(f"{text} ({deal})", [] if any(one.problem for one in answers) else dealt)
        text = (
            f"passed: index for index what torch's DistributedSampler deals, in {len(DEALS)} cases on 1 to 7 ranks: "
            "equal shares, padded or cut, another order in each epoch, the same on every rank"
        )
        return Verdict(passed=True, attempted=True, text=text)


EXERCISE = SamplerExercise(
    "sampler", "length, num_replicas, rank, *, epoch, seed, shuffle, drop_last", sampler_indices
)
