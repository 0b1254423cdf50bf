"""The truth is what plain PyTorch does; and the comparison finds what differs."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from course_lib.classroom.models import MLP, sample_batches
from course_lib.classroom.reference import differences, train

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def test_a_run_by_hand() -> None:
    model = MLP(unused=True)
    before, batches = copy.deepcopy(model.state_dict()), sample_batches(model, 3, 5)
    run = train(model, batches, SGD)
    assert not differences(model.state_dict(), before)  # a copy was trained
    optimizer = SGD(model.parameters())
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        assert run.losses[step] == loss.item() and not differences(run.gradients[step], grads)
        optimizer.step()
        assert not differences(run.states[step], model.state_dict())
    assert run.gradients[0]["spare.bias"] is None and run.state is run.states[2]


def test_clipping_and_another_loss() -> None:
    model = MLP()
    batches = sample_batches(model, 2, 5)
    run = train(model, batches, SGD, clip_norm=0.01)
    free = train(model, batches, SGD)
    norm = lambda grads: torch.cat([g.flatten() for g in grads.values()]).norm().item()
    assert norm(run.gradients[0]) == pytest.approx(0.01, rel=1e-3)
    assert norm(free.gradients[0]) > 0.1
    other = train(model, batches, SGD, loss_fn=lambda out, y: F.cross_entropy(out, y, label_smoothing=0.5))
    assert other.losses[0] != free.losses[0]


def test_what_is_equal() -> None:
    a = {
        "w": torch.tensor([1.0, math.inf, -0.0]),
        "n": torch.tensor(3),
        "none": None,
        "empty": torch.zeros(0),
    }
    assert differences(a, copy.deepcopy(a)) == [] == differences([0.5, 1.5], [0.5, 1.5])
    assert differences(a, {**a, "w": torch.tensor([1.0, math.inf, 0.0])}) == []
    assert differences([1.0 + 1e-9], [1.0], rtol=1e-8) == []


def w(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values)}


@pytest.mark.parametrize(
    ("got", "expected", "sentence"),
    [
        ({"w": torch.ones(2)}, {}, "w is unexpected"),
        ({}, {"w": torch.ones(2)}, "w is missing"),
        ({"w": torch.ones(2)}, {"w": None}, "w is float32 (2,), expected None"),
        ({"w": None}, {"w": torch.ones(2)}, "w is None, expected float32 (2,)"),
        ({"w": torch.ones(2, 1)}, {"w": torch.ones(2)}, "w is float32 (2, 1), expected float32 (2,)"),
        ({"w": torch.ones(2).double()}, {"w": torch.ones(2)}, "w is float64 (2,), expected float32 (2,)"),
        (
            {"w": torch.tensor([1.0, 2.5, 3.25])},
            {"w": torch.tensor([1.0, 2.0, 3.0])},
            "w differs in 2 of 3 elements, most at 1: 2.5, expected 2.0",
        ),
        (w(1, 2), w(1, 3), "w differs in 1 of 2 elements, most at 1: 2.0, expected 3.0"),
        (w(math.nan), w(math.nan), "w differs in 1 of 1 elements, most at 0: nan, expected nan"),
        (w(math.inf), w(-math.inf), "w differs in 1 of 1 elements, most at 0: inf, expected -inf"),
        ([1.0, 2.0], [1.0, 2.5], "loss of step 1 differs in 1 of 1 elements, most at 0: 2.0, expected 2.5"),
        ([1.0], [1.0, 2.5], "loss of step 1 is missing"),
    ],
)  # fmt: skip
def test_what_differs(got, expected, sentence: str) -> None:
    assert differences(got, expected) == [sentence]
    assert differences(got, expected, what="rank 2") == [f"rank 2: {sentence}"]


def test_a_tolerance_is_no_more_than_it_says() -> None:
    assert differences({"w": torch.tensor([100.0])}, {"w": torch.tensor([101.0])}, rtol=0.0098)
    assert differences({"w": torch.tensor([100.0])}, {"w": torch.tensor([101.0])}, rtol=0.01) == []
    assert differences({"w": torch.tensor([math.nan])}, {"w": torch.tensor([1.0])}, rtol=10.0, atol=10.0)
