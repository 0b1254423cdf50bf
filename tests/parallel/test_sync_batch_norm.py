"""SyncBatchNorm: nn.BatchNorm over the whole batch, forward, backward and running statistics, from any slices."""

from __future__ import annotations

import copy
import io
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib import Pool, RankError
from course_lib.classroom.models import DigitsCNN, sample_batches
from course_lib.classroom.reference import differences
from course_lib.parallel.sync_batch_norm import SyncBatchNorm, global_moments
from course_lib.plan import traffic

WORLDS = [1, 2, 3, 4]
ROUNDING = {"rtol": 1e-11, "atol": 1e-12}
"""float64: sums of some hundred terms in another order. A slice's own statistics differ in the first digit."""


@pytest.fixture(scope="module")
def pools():
    """One pool for each world size, kept for the whole file."""
    made: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        if world_size not in made:
            made[world_size] = Pool(world_size, backend="gloo", timeout=20, show="none")
        return made[world_size]

    yield pool
    for one in made.values():
        one.close()


def slices(counts: list[int]) -> list[slice]:
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


def counts_for(world_size: int, kind: str) -> list[int]:
    """How many of 10 samples each rank holds."""
    if kind == "even":
        return {1: [10], 2: [5, 5], 3: [4, 3, 3], 4: [3, 3, 2, 2]}[world_size]
    return {1: [10], 2: [10, 0], 3: [1, 0, 9], 4: [0, 7, 1, 2]}[world_size]


def data(shape: tuple[int, ...], num_steps: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(inputs, what the outputs are multiplied with): distinct values, channels with means far from 0."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, shape, generator=generator, dtype=torch.float64)
    far = 5.0 * torch.arange(shape[1], dtype=torch.float64).view(1, -1, *[1] * (len(shape) - 2))
    return [(draw() * 2 + far, draw()) for _ in range(num_steps)]


LAYERS = {
    "1d": (nn.BatchNorm1d, (10, 7), {}),
    "1d with length": (nn.BatchNorm1d, (10, 7, 3), {"momentum": 0.3}),
    "2d": (nn.BatchNorm2d, (10, 3, 2, 5), {"eps": 0.1}),
    "3d": (nn.BatchNorm3d, (10, 2, 2, 1, 3), {}),
    "cumulative": (nn.BatchNorm2d, (10, 3, 2, 5), {"momentum": None}),
    "not affine": (nn.BatchNorm1d, (10, 7), {"affine": False}),
    "not tracking": (nn.BatchNorm1d, (10, 7), {"track_running_stats": False}),
}


def made_layer(name: str) -> nn.Module:
    make, shape, options = LAYERS[name]
    layer = make(shape[1], **options).double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.linspace(0.5, 2.0, shape[1]) * (-1) ** i)
    return layer


def steps(layer, batches, rows=slice(None)):
    """What each step gives: outputs, gradient of the input; at the end gradients and buffers, then evaluation mode."""
    found = []
    for inputs, factor in batches:
        x = inputs[rows].clone().requires_grad_()
        y = layer(x)
        (y * factor[rows]).sum().backward()
        found.append((y.detach(), x.grad))
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    layer.eval()
    if not layer.track_running_stats:
        rows = slice(None)  # its evaluation takes the slice's own statistics, as nn.BatchNorm's does
    with torch.no_grad():
        evaluated = layer(batches[0][0][rows])
    return found, gradients, dict(layer.named_buffers()), evaluated


def synced(comm, name, counts):
    layer = SyncBatchNorm.convert(made_layer(name), comm)
    comm.ledger.clear()
    return steps(layer, data(LAYERS[name][1]), slices(counts)[comm.rank])


@pytest.mark.parametrize("kind", ["even", "uneven and empty"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_it_is_batch_norm_over_the_whole_batch(pools, world_size: int, name: str, kind: str) -> None:
    counts = counts_for(world_size, kind)
    truth = made_layer(name)
    found, gradients, buffers, evaluated = steps(truth, data(LAYERS[name][1]))
    results = pools(world_size).run(synced, name, counts)
    for rank, (got, _, got_buffers, got_evaluated) in enumerate(results):
        rows = slices(counts)[rank]
        for (y, dx), (true_y, true_dx) in zip(got, found, strict=True):
            ours, expected = {"y": y, "dx": dx}, {"y": true_y[rows], "dx": true_dx[rows]}
            assert not differences(ours, expected, what=f"rank {rank}", **ROUNDING)
        assert not differences(got_buffers, buffers, what=f"rank {rank}", **ROUNDING)
        assert not differences(got_buffers, results[0][2])  # the same bits on all ranks
        shown = slice(None) if name == "not tracking" else rows
        assert not differences({"y": got_evaluated}, {"y": evaluated[shown]}, **ROUNDING)
    added = {parameter: sum(one[1][parameter] for one in results) for parameter in gradients}
    assert not differences(added, gradients, **ROUNDING)


@pytest.mark.parametrize("world_size", WORLDS)
def test_two_small_collectives_a_step_and_none_in_evaluation(pools, world_size: int) -> None:
    results = pools(world_size).run(synced, "2d", counts_for(world_size, "uneven and empty"))
    forward = traffic.ring_all_gather_bytes(world_size, world_size * (2 * 3 + 1), 8)
    backward = traffic.ring_all_reduce_bytes(world_size, 2 * 3, 8)
    for rank, ledger in enumerate(results.ledger):
        rows = [(row.op, row.bytes_sent, row.bytes_received) for row in ledger]
        assert rows == [("all_gather", *forward[rank]), ("all_reduce", *backward[rank])] * 2
        assert forward[rank].sent == (world_size - 1) * (2 * 3 + 1) * 8


def check_gradients(comm) -> bool:
    """gradcheck of this rank's inputs: all ranks move theirs by the same little, one after the other."""
    layer = SyncBatchNorm(2, comm).double()
    x = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
    factor = torch.randn(
        3 * comm.world_size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    mine = slice(3 * comm.rank, 3 * comm.rank + 3)

    def total(x: torch.Tensor) -> float:
        loss = (layer(x) * factor[mine]).sum().detach()
        comm.all_reduce(loss)
        return loss.item()

    variable = x.clone().requires_grad_()
    (layer(variable) * factor[mine]).sum().backward()
    for rank in range(comm.world_size):
        for i in range(x.numel()):
            there, back = x.clone(), x.clone()
            if rank == comm.rank:
                there.view(-1)[i] += 1e-6
                back.view(-1)[i] -= 1e-6
            slope = (total(there) - total(back)) / 2e-6
            if rank == comm.rank and abs(slope - variable.grad.view(-1)[i].item()) > 1e-7:
                return False
    return True


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_gradient_is_the_slope_of_the_ranks_losses_added(pools, world_size: int) -> None:
    assert all(pools(world_size).run(check_gradients))


def train_cnn(comm, batches, counts, convert_whole):
    """Three steps; gradients are summed by hand, and the losses weighted, so that it is the whole batch's mean."""
    model = DigitsCNN(batch_norm=True).double()
    model.features[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # before: it keeps its parameters
    model = SyncBatchNorm.convert(model, comm) if convert_whole else model
    rows, total = slices(counts)[comm.rank], sum(counts)
    for inputs, targets in batches:
        optimizer.zero_grad()
        outputs = model(inputs[rows])
        (F.cross_entropy(outputs, targets[rows], reduction="sum") / total).backward()
        for parameter in model.parameters():
            if parameter.requires_grad:
                comm.all_reduce(parameter.grad)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_whole_network_trains_as_in_one_process(pools, world_size: int) -> None:
    counts = counts_for(world_size, "uneven and empty")
    batches = sample_batches(DigitsCNN(), 3, 10, dtype=torch.float64)
    [truth] = pools(1).run(train_cnn, batches, [10], False)
    for state in pools(world_size).run(train_cnn, batches, counts, True):
        assert not differences(state, truth, rtol=1e-9, atol=1e-12)
    if world_size > 1:  # and without, it is another function
        assert differences(pools(world_size).run(train_cnn, batches, [*counts_for(world_size, "even")], False)[0],
                           truth, rtol=1e-2, atol=1e-2)  # fmt: skip


# --- numbers that are hard


def far_away(comm, dtype, mean):
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
    x = x + mean + comm.rank  # the ranks' means differ, too
    every = x.new_empty(comm.world_size * 50, 3)
    comm.all_gather(every, x)
    means, variance, count = global_moments(comm, x)
    return every, means, variance, count


def test_a_mean_that_is_large_against_the_spread_costs_no_digits(pools) -> None:
    every, mean, variance, count = pools(3).run(far_away, torch.float64, 1e6)[1]
    truth = every.var(dim=0, correction=0)
    assert count == 150 and torch.allclose(mean, every.mean(dim=0), rtol=1e-14)
    assert torch.allclose(variance, truth, rtol=1e-11)
    squares = (every.square().mean(dim=0) - every.mean(dim=0).square() - truth).abs() / truth
    assert squares.max() > 1e-6  # what sums of squares would have cost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_numbers_have_statistics_in_float32(pools, dtype) -> None:
    every, mean, variance, _ = pools(2).run(far_away, dtype, 3)[0]
    assert mean.dtype == variance.dtype == torch.float32 and every.dtype == dtype
    assert torch.allclose(variance, every.float().var(dim=0, correction=0), rtol=1e-5)


def short_layer(comm, dtype, mixed):
    layer = SyncBatchNorm(3, comm)
    layer = layer if mixed else layer.to(dtype)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x[slices([4, 2])[comm.rank]].requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad, layer.weight.grad, layer.running_var, [row.bytes_sent for row in comm.ledger]


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_inputs_give_short_outputs_near_those_of_float32(pools, dtype, mixed: bool) -> None:
    results = pools(2).run(short_layer, dtype, mixed)
    truth = nn.BatchNorm1d(3)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).to(dtype).float().requires_grad_()
    y = truth(x)
    y.square().sum().backward()
    for rank, (got_y, dx, d_weight, running_var, sent) in enumerate(results):
        rows = slices([4, 2])[rank]
        assert got_y.dtype == dx.dtype == dtype
        assert d_weight.dtype == running_var.dtype == (torch.float32 if mixed else dtype)
        assert torch.allclose(got_y.float(), y[rows], atol=0.02)
        assert torch.allclose(running_var.float(), truth.running_var, rtol=0.01)
        assert sent == [7 * 4, 6 * 4]  # float32 travels


# --- replacing layers


class Net(nn.Module):
    """BatchNorm in every place: a child, in a list, twice the same, without parameters, inside of something."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, eps=0.2, momentum=None)
        self.again = self.norm
        self.rest = nn.ModuleList(
            [nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Sequential(nn.BatchNorm3d(4))]
        )
        self.plain = nn.BatchNorm1d(5, track_running_stats=False)
        self.other = nn.GroupNorm(1, 4)
        self.nothing = None


def converted(comm) -> bool:
    model = Net()
    model.norm.weight.requires_grad_(False)
    model.rest[2].eval()
    parameters, buffers, state = list(model.parameters()), list(model.buffers()), model.state_dict()
    result = SyncBatchNorm.convert(model, comm)
    assert result is model
    assert not [m for m in model.modules() if type(m) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)]
    assert sum(isinstance(m, SyncBatchNorm) for m in model.modules()) == 4
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    assert list(model.state_dict()) == list(state)
    assert model.norm is model.again and not model.norm.weight.requires_grad
    assert (model.norm.eps, model.norm.momentum, model.norm.training) == (0.2, None, True)
    assert not model.rest[2].training and not model.rest[2][0].training
    assert not model.rest[1].affine and model.rest[1].weight is None
    assert model.plain.running_mean is None and type(model.other) is nn.GroupNorm
    alone = nn.BatchNorm1d(3)
    new = SyncBatchNorm.convert(alone, comm)
    assert type(new) is SyncBatchNorm and new.weight is alone.weight and type(alone) is nn.BatchNorm1d
    assert SyncBatchNorm.convert(new, comm).weight is alone.weight  # once more changes nothing
    twin = copy.deepcopy(new)
    assert twin.comm is comm and twin.weight is not new.weight and torch.equal(twin.weight, new.weight)
    file = io.BytesIO()
    torch.save(new.state_dict(), file)
    file.seek(0)
    nn.BatchNorm1d(3).load_state_dict(torch.load(file, weights_only=True))
    return True


def test_convert_keeps_everything_but_the_layer(pools) -> None:
    assert all(pools(2).run(converted))


def without_bias(comm):
    layer = SyncBatchNorm.convert(nn.BatchNorm1d(3, bias=False), comm)
    layer(torch.randn(4, 3)).square().sum().backward()
    return layer.bias is None and layer.weight.grad is not None


def test_a_layer_without_bias(pools) -> None:
    try:
        nn.BatchNorm1d(3, bias=False)
    except TypeError:
        pytest.skip("this torch's BatchNorm always has a bias")
    assert all(pools(1).run(without_bias))


def first_layer(comm) -> list[str]:
    """Nobody needs the gradient of the inputs: nothing travels in backward."""
    layer = SyncBatchNorm(3, comm)
    layer(torch.randn(4, 3)).square().sum().backward()
    return [row.op for row in comm.ledger]


def test_inputs_that_need_no_gradient_cost_no_message_in_backward(pools) -> None:
    assert pools(2).run(first_layer) == [["all_gather"]] * 2


# --- what makes no sense


def one_value(comm, counts):
    SyncBatchNorm(3, comm)(torch.ones(counts[comm.rank], 3))


@pytest.mark.parametrize("counts", [[1], [0, 1]])
def test_one_value_in_all_is_refused_on_every_rank(counts) -> None:
    sentence = r"rank \d: expected more than 1 value per channel when training, got 1 on all ranks together"
    with pytest.raises(RankError, match=sentence), Pool(len(counts), timeout=10, show="none") as pool:
        pool.run(one_value, counts)


def one_value_each(comm):
    layer = SyncBatchNorm(3, comm)
    return layer(torch.full((1, 3), float(comm.rank)))


def test_one_value_on_each_of_two_ranks_is_enough(pools) -> None:
    first, second = pools(2).run(one_value_each)
    assert torch.allclose(first, -second) and first.abs().min() > 0.9


def nothing_at_all(comm):
    layer = SyncBatchNorm(3, comm)
    x = torch.ones(0, 3, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    return y.shape, x.grad.shape, layer.weight.grad.tolist(), layer.running_var.tolist()


def test_no_sample_on_any_rank_is_as_in_batch_norm(pools) -> None:
    assert pools(2).run(nothing_at_all) == [((0, 3), (0, 3), [0, 0, 0], [1, 1, 1])] * 2


def errors(comm):
    said = []
    for call in (
        lambda: SyncBatchNorm(3, comm)(torch.ones(2, 4)),
        lambda: SyncBatchNorm(3, comm)(torch.ones(3)),
        lambda: SyncBatchNorm(3, comm)(torch.ones(2, 3, dtype=torch.int64)),
        lambda: SyncBatchNorm(3, None),
        lambda: SyncBatchNorm.convert(nn.LazyBatchNorm1d(), comm),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        said.append(str(caught.value))
    half = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="module: 1, a LazyBatchNorm1d"):
        SyncBatchNorm.convert(half, comm)
    return [*said, type(half[0]).__name__]


def test_errors_say_what_to_do(pools) -> None:
    said = pools(1).run(errors)[0]
    assert said[0].startswith("rank 0: input: expected floating point numbers of shape (batch, 3, ...)")
    assert "got float32 of shape (2, 4)" in said[0] and "got float32 of shape (3,)" in said[1]
    assert "got int64" in said[2] and said[3] == "comm: expected a Communicator, got NoneType"
    assert "LazyBatchNorm1d, does not know its number of channels yet; run one batch" in said[4]
    assert said[5] == "BatchNorm1d"
