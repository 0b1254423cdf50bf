"""The equality grid: every way to train gives what one process on the whole batch gives, step after step.

A row is a strategy, a column a case, and each is run in worlds of 1, 2, 3 and 4 ranks. A new strategy is a name in
`strategies.STRATEGIES`: it is in the grid at once. Where a case makes no sense for it, `LEFT_OUT` says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from course_lib import RankError
from course_lib.classroom.gpt import GPT, gpt_batches, token_loss
from course_lib.classroom.models import MLP, DigitsCNN, sample_batches
from course_lib.classroom.reference import Run, differences, train
from course_lib.strategies import STRATEGIES, build

WORLDS = [1, 2, 3, 4]
NUM_STEPS = 10
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)

ROUNDING = {"rtol": 1e-10, "atol": 1e-12}
"""float64 rounds to 1e-16. Adding in another order was measured to change a tensor, after 10 steps, by at most 2e-15 of
its largest element; a sample lost, or a mean of means, changes the third digit."""

NORMALISED = {"rtol": 1e-9, "atol": 1e-11}
"""BatchNorm divides by a standard deviation, which makes a rounding larger."""


@dataclass(frozen=True)
class Case:
    """One column: what is trained, on which batches, how exact."""

    name: str
    model: Callable[[], nn.Module] = MLP
    batch_size: int = 5
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    dtype: torch.dtype = torch.float64
    tolerance: dict[str, float] = field(default_factory=lambda: dict(ROUNDING))
    options: dict[str, Any] = field(default_factory=dict)

    def made(self) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
        model = self.model().to(self.dtype)
        if isinstance(model, GPT):
            return model, gpt_batches(model, NUM_STEPS, self.batch_size)
        return model, sample_batches(model, NUM_STEPS, self.batch_size, dtype=self.dtype)

    def truth(self) -> Run:
        options = {name: value for name, value in self.options.items() if name != "accumulate"}
        return train(*self.made(), self.optimizer, **options)


ALL_CASES = [
    Case("plain"),
    Case("tied, frozen and unused", partial(MLP, tied=True, frozen=True, unused=True), optimizer=ADAMW),
    Case("odd sizes", partial(MLP, 7, 3, 2, seed=3), batch_size=7),
    Case("convolutions", DigitsCNN, batch_size=6),
    Case("clipping", partial(MLP, frozen=True), options={"clip_norm": 0.3}),
    Case("accumulation", batch_size=9, options={"accumulate": 2}),
    Case(
        "accumulation and clipping",
        partial(MLP, tied=True),
        11,
        ADAMW,
        options={"accumulate": 2, "clip_norm": 0.3},
    ),
    Case("GPT", GPT, optimizer=ADAMW, options={"loss_fn": token_loss}),
    Case(
        "GPT, accumulation and clipping",
        partial(GPT, tied=False),
        9,
        options={"loss_fn": token_loss, "accumulate": 2, "clip_norm": 0.3},
    ),
    Case("batch norm", partial(DigitsCNN, batch_norm=True), batch_size=7, tolerance=NORMALISED),
    Case(
        "batch norm, clipping",  # not with Adam: a bias before BatchNorm has a gradient of rounding alone
        partial(DigitsCNN, 3, batch_norm=True),
        6,
        tolerance=NORMALISED,
        options={"clip_norm": 0.3},
    ),
    Case("a rank without a sample", partial(MLP, tied=True), batch_size=3),
    Case("dropout", partial(MLP, dropout=0.3)),
    # float32 rounds to 6e-8; measured after 10 steps: 4e-7
    Case("float32", dtype=torch.float32, tolerance={"rtol": 1e-5, "atol": 2e-6}),
]
CASES = {case.name: case for case in ALL_CASES}
OWN_MASKS = (
    "each slice of the batch draws its own dropout mask, so the masks are not those of the whole batch"
)
OWN_STATISTICS = "each slice of the batch is normalised by itself"
CUT = [strategy for strategy in STRATEGIES if strategy != "single"]
LEFT_OUT = {(strategy, "dropout"): OWN_MASKS for strategy in CUT} | {
    (strategy, case): OWN_STATISTICS
    for strategy in ("parameter_server", "data_parallel")
    for case in ("batch norm", "batch norm, clipping")
}
LEFT_OUT["data_parallel", "a rank without a sample"] = "every replica needs one"
"""(strategy, case) -> why it cannot be equal on several ranks."""

BIT_FOR_BIT = {"single"}
"""Strategies that add the same numbers in the same order as the reference, where the batch is not cut into pieces."""


def train_alone(comm, case: Case) -> Run:
    torch.manual_seed(0)
    return case.truth()


def train_on_rank(comm, strategy: str, case: Case) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and states of all steps, as this rank has them."""
    torch.manual_seed(0)  # for dropout
    model, batches = case.made()
    way = build(strategy, model.to(comm.device), comm, case.optimizer, **case.options)
    losses, states = [], []
    for inputs, targets in batches:
        losses.append(way.step(inputs.to(comm.device), targets.to(comm.device)))
        states.append(way.full_state_dict())
    return losses, states


@pytest.fixture(scope="module")
def truths(ranks):
    """case -> the reference, in a process like the ranks: a product on two threads has other last bits than on one."""
    known: dict[str, Run] = {}

    def truth(case: Case) -> Run:
        if case.name not in known:
            known[case.name] = ranks.run(1, train_alone, case)[0]
        return known[case.name]

    return truth


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_one_process_on_the_whole_batch(
    ranks, truths, strategy: str, name: str, world_size: int
) -> None:
    if world_size > 1 and (reason := LEFT_OUT.get((strategy, name))):
        pytest.skip(reason)
    case, expected = CASES[name], truths(CASES[name])
    exact = strategy in BIT_FOR_BIT and "accumulate" not in case.options
    tolerance = {} if exact else case.tolerance
    for rank, (losses, states) in enumerate(ranks.run(world_size, train_on_rank, strategy, case)):
        found = differences(losses, expected.losses, what=f"rank {rank}", **tolerance)
        for step, (state, wanted) in enumerate(zip(states, expected.states, strict=True)):
            found += differences(state, wanted, what=f"rank {rank}, step {step}", **tolerance)
        assert not found, "\n".join(found[:5])


def test_the_grid_would_notice_a_mean_of_means(ranks, truths) -> None:
    """A batch of 5 on 2 ranks, each slice's mean counted alike: far outside the tolerance, in the first step."""

    def mean_of_means(comm, case: Case) -> list[float]:
        plain = lambda gradients, counts: sum(gradients) / len(gradients)
        model, batches = case.made()
        way = build("parameter_server", model, comm, case.optimizer, aggregate=plain)
        return [way.step(*batch) for batch in batches]

    losses = ranks.run(2, mean_of_means, CASES["plain"])[0]
    wrong = differences(losses, truths(CASES["plain"]).losses, rtol=1e-4, atol=0.0)
    assert len(wrong) == NUM_STEPS - 1  # the first loss is that of the untouched parameters


def test_the_cases_do_something(ranks, truths) -> None:
    """Clipping clips, and the unused and the frozen parameters are there."""
    for name in ("clipping", "accumulation and clipping"):
        free = train(*CASES[name].made(), CASES[name].optimizer)
        assert differences(free.losses, truths(CASES[name]).losses, rtol=1e-3)
    run = truths(CASES["tied, frozen and unused"])
    grads = run.gradients[-1]
    assert {key for key, grad in grads.items() if grad is None} >= {"first.weight", "spare.weight"}
    assert torch.equal(run.state["second.weight"], run.state["third.weight"])


def test_batch_norm_only_single_is_equal_and_the_state_is_the_same_on_all_ranks(ranks, truths) -> None:
    case = Case("batch norm of 8", partial(DigitsCNN, batch_norm=True), batch_size=8)
    expected = truths(case)
    for strategy in ("single", "parameter_server", "data_parallel"):
        results = ranks.run(2, train_on_rank, strategy, case)
        (losses, states), (other_losses, other_states) = results
        assert losses == other_losses and not differences(states[-1], other_states[-1])
        assert (not differences(losses, expected.losses, **ROUNDING)) is (strategy == "single")


# --- what they send


def bytes_of(comm, strategy: str) -> tuple[int, int]:
    """(sent, received) in one step of a float64 model."""
    model, batches = CASES["plain"].made()
    way = build(strategy, model, comm, SGD)
    comm.ledger.clear()
    way.step(*batches[0])
    return comm.ledger.bytes_sent, comm.ledger.bytes_received


def test_data_parallel_is_one_process_and_the_others_only_hear_the_loss(ranks) -> None:
    assert ranks.run(3, bytes_of, "single") == [(0, 0)] * 3
    sent, received = zip(*ranks.run(3, bytes_of, "data_parallel"), strict=True)
    assert received == (0, 8, 8) and sum(sent) == 16


# --- errors


def try_build(comm, name: str, options: dict[str, Any]) -> None:
    build(name, MLP(), comm, SGD, **options).step(*sample_batches(MLP(), 1, 3)[0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("data_paralel", {}, "ValueError: name: expected one of single, param.*, got 'data_paralel'"),
        ("single", {"clip": 1.0}, "TypeError: .*unexpected keyword argument 'clip'"),
        ("data_parallel", {"clip": 1.0}, "TypeError: .*unexpected keyword argument 'clip'"),
        ("single", {"accumulate": 0}, "ValueError: accumulate: expected 1 piece or more, got 0"),
        ("ddp_flat", {"clip_norm": -1.0}, "ValueError: clip_norm: expected a norm above 0, or None .* got -1.0"),
        ("single", {"clip_norm": math.nan}, "ValueError: clip_norm: expected a norm above 0, or None .* got nan"),
        ("data_parallel", {"accumulate": 2}, "inputs: a batch of 3 is too small for 2 replicas and accumulate=2"),
        ("data_parallel", {"device_ids": ["cuda:97"] * 2}, r"ValueError: device_ids\[0\]: expected a device"),
    ],
)  # fmt: skip
def test_wrong_requests(ranks, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks.run(2, try_build, name, options)


def one_step(comm, name: str, num_inputs: int, num_targets: int) -> None:
    way = build(name, MLP(), comm, SGD)
    way.step(torch.ones(num_inputs, 57), torch.zeros(num_targets, dtype=torch.int64))


@pytest.mark.parametrize("sizes", [(0, 0), (4, 7)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_batches_that_are_none(ranks, name: str, sizes: tuple[int, int]) -> None:
    with pytest.raises(RankError, match=r"ValueError: rank .: expected the whole batch on every rank"):
        ranks.run(2, one_step, name, *sizes)
