"""The course's small models: the same on every rank, awkward in size, tied and frozen where asked."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from course_lib.classroom.datasets import digits
from course_lib.classroom.models import (
    MLP,
    DigitsCNN,
    accuracy,
    digits_mlp,
    sample_batches,
    seeded,
    shuffled_batches,
)
from course_lib.classroom.reference import differences

MODELS = [MLP, DigitsCNN, digits_mlp]


@pytest.mark.parametrize("make", MODELS)
def test_a_seed_gives_the_same_model_and_the_global_generator_is_left_alone(make) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one = make(seed=5)
    assert torch.equal(torch.rand(3), expected)
    assert not differences(one.state_dict(), make(seed=5).state_dict())
    assert differences(one.state_dict(), make(seed=6).state_dict())


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_shapes(make, batch_size: int) -> None:
    model = make()
    [(inputs, targets)] = sample_batches(model, 1, batch_size)
    assert inputs.shape == (batch_size, *model.input_shape) and targets.shape == (batch_size,)
    outputs = model(inputs)
    assert outputs.shape == (batch_size, model.num_classes)
    F.cross_entropy(outputs, targets).backward()
    assert all(torch.count_nonzero(p.grad) > 0 for p in model.parameters())


def test_tied_frozen_unused_dropout() -> None:
    model = MLP(tied=True, frozen=True, unused=True, dropout=0.5)
    assert model.third.weight is model.second.weight and model.third.bias is not model.second.bias
    plain = MLP()
    [(inputs, targets)] = sample_batches(model, 1, 5)
    assert not torch.equal(model(inputs), model(inputs)) and torch.equal(model.eval()(inputs), model(inputs))
    for one in (model, plain):
        F.cross_entropy(one(inputs), targets).backward()
    frozen = {name for name, p in model.named_parameters() if p.grad is None}
    assert frozen == {"first.weight", "first.bias", "spare.weight", "spare.bias"}
    assert sum(p.numel() for p in plain.parameters()) - 19 * 19 == sum(
        p.numel() for p in MLP(tied=True).parameters()
    )


def test_with_batch_norm_a_slice_gives_other_outputs() -> None:
    [(inputs, _)] = sample_batches(DigitsCNN(), 1, 6)
    for batch_norm in (False, True):
        model = DigitsCNN(batch_norm=batch_norm)
        assert torch.allclose(model(inputs)[:3], model(inputs[:3]), atol=1e-5) is not batch_norm


def test_batches_are_distinct_and_follow_from_the_seed() -> None:
    first = sample_batches(MLP(), 2, 5, dtype=torch.float64)
    again = sample_batches(MLP(), 2, 5, dtype=torch.float64)
    assert all(
        torch.equal(a, b)
        for one, two in zip(first, again, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    values = torch.cat([inputs.flatten() for inputs, _ in first])
    assert values.dtype == torch.float64 and len(values.unique()) == len(values)
    assert not torch.equal(first[0][0], sample_batches(MLP(), 1, 5, dtype=torch.float64, seed=2)[0][0])


def test_an_epoch_has_each_sample_once() -> None:
    inputs = torch.arange(11)
    batches = shuffled_batches(inputs, inputs * 2, 3, seed=4)
    assert [len(batch) for batch, _ in batches] == [3, 3, 3]
    seen = torch.cat([batch for batch, _ in batches])
    assert len(seen.unique()) == 9 and seen.tolist() != sorted(seen.tolist())
    assert all(torch.equal(targets, batch * 2) for batch, targets in batches)


def test_seeded_restores_also_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(KeyError), seeded(3):
        torch.rand(1)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("model", "num_epochs"), [(digits_mlp(), 5), (DigitsCNN(batch_norm=True), 2)])
def test_they_learn_the_digits(model, num_epochs: int) -> None:
    flat = isinstance(model, MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(num_epochs):
        for inputs, targets in shuffled_batches(*digits(flat=flat), 57, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert accuracy(model, *digits("test", flat=flat)) > 0.8 and model.training
