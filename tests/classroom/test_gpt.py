"""The small GPT: causal, tied where asked, the same on every rank, in float64 too, and for no sample at all."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from course_lib.classroom.datasets import text_batches
from course_lib.classroom.gpt import GPT, gpt_6m, gpt_batches, token_loss
from course_lib.classroom.reference import differences, train

ROUNDING = {"rtol": 1e-10, "atol": 1e-14}
"""float64: a few hundred terms in another order."""


def test_a_seed_gives_the_same_model_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one = GPT(seed=5)
    assert torch.equal(torch.rand(3), expected)
    assert not differences(one.state_dict(), GPT(seed=5).state_dict())
    assert differences(one.state_dict(), GPT(seed=6).state_dict())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_shapes_and_a_gradient_for_every_parameter(batch_size: int, dtype: torch.dtype, tied: bool) -> None:
    model = GPT(tied=tied).to(dtype)
    [(tokens, targets)] = gpt_batches(model, 1, batch_size)
    assert tokens.shape == targets.shape == (batch_size, *model.input_shape) and tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    logits = model(tokens)
    assert logits.shape == (batch_size, 16, model.num_classes) and logits.dtype == dtype
    token_loss(logits, targets).backward()
    assert all(torch.count_nonzero(p.grad) > 0 for p in model.parameters())
    assert (model.head.weight is model.tokens.weight) is tied


def test_a_tied_gradient_is_the_sum_of_both() -> None:
    tied, free = GPT(seed=2).double(), GPT(tied=False, seed=2).double()
    free.load_state_dict(tied.state_dict())
    [(tokens, targets)] = gpt_batches(tied, 1, 3)
    for model in (tied, free):
        token_loss(model(tokens), targets).backward()
    both = free.tokens.weight.grad + free.head.weight.grad
    assert torch.allclose(tied.tokens.weight.grad, both, rtol=1e-12, atol=1e-15)
    assert sum(p.numel() for p in free.parameters()) - 57 * 24 == sum(p.numel() for p in tied.parameters())


def test_a_position_sees_itself_and_what_came_before() -> None:
    model = GPT().double()
    [(tokens, _)] = gpt_batches(model, 1, 2)
    other = tokens.clone()
    other[:, 9] = (other[:, 9] + 1) % 57
    changed = (model(tokens) - model(other)).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == [False] * 9 + [True] * 7
    assert torch.allclose(model(tokens[:, :4]), model(tokens)[:, :4], rtol=1e-10)


def test_attention_by_hand() -> None:
    attention = GPT(width=6, num_heads=2).double().blocks[0].attention
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = attention.qkv(x).split(6, dim=-1)
    heads = []
    for head in (slice(0, 3), slice(3, 6)):
        scores = q[..., head] @ k[..., head].transpose(1, 2) / math.sqrt(3)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(dim=-1) @ v[..., head])
    assert torch.allclose(attention(x), attention.out(torch.cat(heads, dim=-1)), rtol=1e-12)


def test_the_loss_is_the_mean_of_the_samples_means() -> None:
    model = GPT().double()
    [(tokens, targets)] = gpt_batches(model, 1, 5)
    logits = model(tokens)
    each = [F.cross_entropy(one, answers) for one, answers in zip(logits, targets, strict=True)]
    assert torch.allclose(token_loss(logits, targets), torch.stack(each).mean(), rtol=1e-13)
    untrained = token_loss(logits, targets).item()
    assert untrained == pytest.approx(math.log(57), rel=0.02)


def test_slices_weighted_with_their_samples_give_the_whole_batchs_gradient() -> None:
    model = GPT(dropout=0.0).double()
    [(tokens, targets)] = gpt_batches(model, 1, 5)
    token_loss(model(tokens), targets).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for rows in (slice(0, 2), slice(2, 5), slice(5, 5)):
        part = targets[rows]
        (token_loss(model(tokens[rows]), part) * len(part) / 5).backward()
    assert not differences({n: p.grad for n, p in model.named_parameters()}, whole, **ROUNDING)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_no_sample_gives_no_error_no_nan_and_gradients_of_zero(dropout: float) -> None:
    model = GPT(dropout=dropout)
    [(tokens, targets)] = gpt_batches(model, 1, 0)
    logits = model(tokens)
    loss = token_loss(logits, targets)
    loss.backward()
    assert logits.shape == (0, 16, 57) and loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_dropout_acts_in_training_alone() -> None:
    model = GPT(dropout=0.3)
    [(tokens, _)] = gpt_batches(model, 1, 2)
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))
    assert torch.equal(GPT()(tokens), model(tokens))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: GPT(num_heads=5), "num_heads: expected a divisor of width = 24, got 5"),
        (lambda: GPT()(torch.zeros(2, 17, dtype=torch.int64)), r"time at most 16.* got shape \(2, 17\)"),
        (lambda: GPT()(torch.zeros(16, dtype=torch.int64)), r"tokens: expected \(batch, time\)"),
    ],
)
def test_what_does_not_fit_is_refused(call, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_no_gradient_is_rounding_alone() -> None:
    """Else Adam makes of it a step of full length in a random direction, and nothing equals the reference."""
    model = GPT().double()
    [(tokens, targets)] = gpt_batches(model, 1, 5)
    token_loss(model(tokens), targets).backward()
    assert all(p.grad.abs().max() > 1e-6 for p in model.parameters())


def test_it_learns_and_the_reference_trains_it() -> None:
    model = GPT(vocab_size=96, context=16, width=24)
    before = copy.deepcopy(model.state_dict())
    batches = list(text_batches(batch_size=32, length=16, num_batches=60))
    run = train(model, batches, partial(torch.optim.AdamW, lr=0.01), loss_fn=token_loss)
    assert run.losses[0] == pytest.approx(math.log(96), rel=0.05) and run.losses[-1] < 3.2
    assert not differences(model.state_dict(), before)


def test_the_bench_model_has_six_million_parameters_and_knows_the_corpus() -> None:
    model = gpt_6m()
    assert 5_900_000 < sum(p.numel() for p in model.parameters()) < 6_100_000
    assert model.num_classes == 96 and model.input_shape == (64,)
