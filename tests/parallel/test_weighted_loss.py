"""weighted_loss in DDP: the gradient and the loss of all samples in one process, however they are shared out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib import Pool
from course_lib.classroom.models import MLP, sample_batches
from course_lib.classroom.reference import differences
from course_lib.parallel.ddp import BucketedDDP
from course_lib.parallel.ddp.weighting import weighted_loss

ROUNDING = {"rtol": 1e-11, "atol": 1e-14}
"""float64: a dozen terms in another order."""


class Scale(nn.Module):
    """A sample is its own loss, and its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def tokens(comm, held):
    model = BucketedDDP(Scale(), comm)
    mine = torch.tensor(held[comm.rank])
    loss = weighted_loss(comm, model(mine).sum(), len(mine))
    loss.backward()
    mean = loss.detach().clone()
    comm.all_reduce(mean, "avg")
    return model.module.weight.grad.item(), mean.item()


@pytest.mark.parametrize(
    ("held", "mean"),
    [
        ([[4.0], [1.0, 1.0, 1.0]], 1.75),
        ([[4.0], []], 4.0),
        ([[], [2.0, 4.0], [9.0]], 5.0),
        ([[], []], 0.0),
        ([[3.0, 5.0]], 4.0),
    ],
)
def test_every_sample_counts_the_same(held, mean: float) -> None:
    with Pool(len(held), backend="gloo", timeout=10, show="none") as pool:
        assert pool.run(tokens, held) == [pytest.approx((mean, mean))] * len(held)


def train(comm, counts, rows, accumulate):
    """The gradient of 10 samples, and the bytes that weighing took."""
    model = BucketedDDP(MLP(tied=True).double(), comm)
    [(inputs, targets)] = sample_batches(MLP(), 1, 10, dtype=torch.float64)
    x, y = inputs[rows[comm.rank]], targets[rows[comm.rank]]
    half = len(x) // 2 if accumulate else 0
    if half:
        with model.no_sync():
            loss_sum = F.cross_entropy(model(x[:half]), y[:half], reduction="sum")
            weighted_loss(comm, loss_sum, len(x)).backward()
    loss_sum = F.cross_entropy(model(x[half:]), y[half:], reduction="sum")
    comm.ledger.clear()
    loss = weighted_loss(comm, loss_sum, torch.tensor(len(x)))
    sent = [(row.op, row.bytes_sent) for row in comm.ledger]
    loss.backward()
    return {name: p.grad for name, p in model.module.named_parameters()}, sent


@pytest.mark.parametrize(("counts", "accumulate"), [([9, 1], False), ([3, 0, 7], False), ([6, 4], True)])
def test_the_gradient_is_that_of_one_process(counts: list[int], accumulate: bool) -> None:
    model = MLP(tied=True).double()
    [(inputs, targets)] = sample_batches(model, 1, 10, dtype=torch.float64)
    F.cross_entropy(model(inputs), targets).backward()
    truth = {name: p.grad for name, p in model.named_parameters()}
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    rows = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
    with Pool(len(counts), backend="gloo", timeout=10, show="none") as pool:
        for gradients, sent in pool.run(train, counts, rows, accumulate):
            assert not differences(gradients, truth, **ROUNDING)
            assert [op for op, _ in sent] == ["all_reduce"] and sent[0][1] <= 16  # one integer
