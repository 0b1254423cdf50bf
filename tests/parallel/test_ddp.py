"""The ladder of DDP on real ranks. That each rung equals one process stands in `tests/test_strategies.py`; here stands
what it sends, when, what it does with unusual models, and what it says when something is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib import RankError, RanksHung, launch
from course_lib.classroom.models import MLP, DigitsCNN, sample_batches
from course_lib.comm.trace import Event
from course_lib.parallel.ddp import (
    BucketedDDP,
    FlatDDP,
    Overlap,
    PerParameterDDP,
    bf16_compress_hook,
    measure_overlap,
    weighted_loss,
)
from course_lib.parallel.ddp.unused import unused_parameters
from course_lib.plan.partition import chunk_bounds
from course_lib.plan.traffic import ring_all_reduce_bytes

RUNGS = [PerParameterDDP, FlatDDP, BucketedDDP]
EXACT = {"rtol": 1e-12, "atol": 1e-14}  # float64; only the order of sums differs


def my_part(comm, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    start, stop = chunk_bounds(len(batch[0]), comm.world_size)[comm.rank]
    return batch[0][start:stop], batch[1][start:stop]


def one_backward(comm, wrap: Callable, model: nn.Module, batch_size: int = 6, **options: Any) -> Any:
    """Wrap, run one batch's forward and backward; the wrapper."""
    wrapped = wrap(model, comm, **options)
    dtype = next(model.parameters()).dtype
    inputs, targets = my_part(comm, sample_batches(model, 1, batch_size, dtype=dtype)[0])
    comm.ledger.clear()
    F.cross_entropy(wrapped(inputs), targets).backward()
    return wrapped


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def whole_batch_gradients(model: nn.Module, batch_size: int = 6) -> list[torch.Tensor | None]:
    inputs, targets = sample_batches(model, 1, batch_size, dtype=next(model.parameters()).dtype)[0]
    model.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    return gradients(model)


def assert_equal(got: list, wanted: list, **tolerance: float) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **(tolerance or EXACT))


# --- what travels, and when


@pytest.mark.parametrize(("rung", "num_messages"), [(PerParameterDDP, 8), (FlatDDP, 1), (BucketedDDP, 1)])
def test_each_rung_sends_the_gradients_once(ranks, rung: Any, num_messages: int) -> None:
    def run(comm):
        one_backward(comm, rung, MLP())
        return [(row.op, row.bytes_sent) for row in comm.ledger]

    sizes = [p.numel() for p in MLP().parameters()]
    for rank, rows in enumerate(ranks.run(3, run)):
        assert [op for op, _ in rows] == ["all_reduce"] * num_messages
        parts = sizes if rung is PerParameterDDP else [sum(sizes)]
        assert sum(sent for _, sent in rows) == sum(ring_all_reduce_bytes(3, n, 4)[rank].sent for n in parts)


def test_a_bucket_leaves_while_backward_runs(ranks) -> None:
    """The first all-reduce begins before the first layer's gradient is there; a flat buffer waits for all of it."""

    def run(comm, rung, options):
        model, ready = MLP(), {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: ready.__setitem__(name, comm.now())
            )
        one_backward(comm, rung, model, **options)
        return [row.start_s for row in comm.ledger], ready

    small = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005}
    for starts, ready in ranks.run(2, run, BucketedDDP, small):
        assert len(starts) > 3 and starts == sorted(starts)
        assert ready["head.weight"] < starts[0] < ready["first.weight"] < starts[-1]
    for starts, ready in ranks.run(2, run, FlatDDP, {}):
        assert len(starts) == 1 and max(ready.values()) < starts[0]


def test_the_first_bucket_holds_the_last_layer(ranks) -> None:
    def run(comm):
        wrapped = BucketedDDP(MLP(), comm, bucket_cap_mb=0.002, first_bucket_mb=0.0005)
        names = {parameter: name for name, parameter in wrapped.module.named_parameters()}
        return [[names[p] for p in bucket.views] for bucket in wrapped.buckets], repr(wrapped.buckets[0])

    buckets, text = ranks.run(2, run)[0]
    assert buckets[0] == ["head.bias", "head.weight"] and text == "Bucket(2 gradients, 0.00 MiB)"
    assert buckets[1:] == [
        ["third.bias", "third.weight", "second.bias", "second.weight"],
        ["first.bias", "first.weight"],
    ]


def test_nothing_but_gradients_travels_after_the_start(ranks) -> None:
    def run(comm):
        wrapped = BucketedDDP(MLP(frozen=True), comm)
        at_start = comm.ledger.bytes_sent
        comm.ledger.clear()
        for inputs, targets in sample_batches(MLP(), 3, 4):
            F.cross_entropy(wrapped(inputs), targets).backward()
        return at_start, comm.ledger.bytes_sent, [row.op for row in comm.ledger]

    model = MLP(frozen=True)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    everything = sum(p.nbytes for p in model.parameters())
    (at_start, sent, ops), _ = ranks.run(2, run)
    assert everything < at_start < everything + 2000  # the description of the model, too
    assert sent == 3 * trained and ops == ["all_reduce"] * 3  # 2(N-1)/N is 1 on two ranks


def test_gradients_are_views_into_their_buckets(ranks) -> None:
    def run(comm):
        wrapped = one_backward(comm, BucketedDDP, MLP())
        for bucket in wrapped.buckets:
            assert all(p.grad is view and p.grad._base is bucket.flat for p, view in bucket.views.items())

    ranks.run(2, run)


def test_bf16_sends_half_and_is_near(ranks) -> None:
    def run(comm):
        plain = one_backward(comm, BucketedDDP, MLP())
        full = comm.ledger.bytes_sent
        compressed = one_backward(comm, BucketedDDP, MLP(), comm_hook=bf16_compress_hook)
        assert comm.ledger.bytes_sent * 2 == full
        assert_equal(
            gradients(compressed), gradients(plain), rtol=2**-7, atol=5e-4
        )  # a sum near 0 of two that are not
        with pytest.raises(AssertionError):
            assert_equal(gradients(compressed), gradients(plain), rtol=1e-6, atol=1e-8)

    ranks.run(2, run)


# --- the same models everywhere


@pytest.mark.parametrize("rung", RUNGS)
def test_all_begin_as_rank_0(ranks, rung: Any) -> None:
    def run(comm):
        model = DigitsCNN(3, batch_norm=True, seed=comm.rank)
        model.features[1].running_mean += comm.rank + 1
        return rung(model, comm).state_dict()

    states = ranks.run(3, run)
    wanted = DigitsCNN(3, batch_norm=True, seed=0).state_dict()
    wanted["features.1.running_mean"] += 1
    assert all(torch.equal(state[name], wanted[name]) for state in states for name in wanted)


def test_buffers_follow_rank_0_in_training_only(ranks) -> None:
    def run(comm, **options):
        wrapped = BucketedDDP(DigitsCNN(3, batch_norm=True), comm, **options)
        inputs = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(comm.rank))
        wrapped(inputs)
        own = wrapped.module.features[1].running_mean.clone()
        comm.ledger.clear()
        wrapped(inputs)
        ops = [row.op for row in comm.ledger]
        wrapped.eval()
        with torch.no_grad():
            wrapped(inputs)
        assert [row.op for row in comm.ledger] == ops
        return ops, own

    (ops, first), (_, second) = ranks.run(2, run)
    assert ops == ["broadcast"]  # of float32 and int64 together
    assert not torch.equal(first, second)


def test_one_rank_may_evaluate_alone(ranks) -> None:
    def run(comm):
        wrapped = BucketedDDP(DigitsCNN(3, batch_norm=True), comm).eval()
        if comm.rank == 0:
            with torch.no_grad():
                return wrapped(torch.zeros(2, 1, 8, 8)).shape

    assert ranks.run(2, run)[0] == (2, 10)


def test_checkpoints_fit_the_plain_model_and_torchs_wrapper(ranks) -> None:
    def run(comm):
        ours, theirs = FlatDDP(MLP(seed=1), comm), DistributedDataParallel(MLP(seed=2))
        assert list(ours.state_dict()) == list(MLP().state_dict())
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours.module.first.weight, theirs.module.first.weight)
        MLP().load_state_dict(ours.state_dict())

    ranks.run(2, run)


# --- accumulation


@pytest.mark.parametrize("rung", [*RUNGS, "torch"])
@pytest.mark.parametrize("forward_inside", [True, False])
def test_no_sync_is_where_the_forward_ran(ranks, rung: Any, forward_inside: bool) -> None:
    """As torch's: a forward before `no_sync` whose backward is inside is averaged all the same."""

    def run(comm):
        wrapped = DistributedDataParallel(MLP().double()) if rung == "torch" else rung(MLP().double(), comm)
        inputs, targets = my_part(comm, sample_batches(MLP(), 1, 6, dtype=torch.float64)[0])
        if forward_inside:
            with wrapped.no_sync():
                outputs = wrapped(inputs)
            F.cross_entropy(outputs, targets).backward()
        else:
            outputs = wrapped(inputs)
            with wrapped.no_sync():
                F.cross_entropy(outputs, targets).backward()
        return gradients(wrapped)

    first, second = ranks.run(2, run)
    assert torch.equal(first[0], second[0]) is not forward_inside


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("to_none", [True, False])
def test_accumulation_sends_once_and_equals_the_whole(ranks, rung: Any, to_none: bool) -> None:
    def run(comm):
        wrapped = rung(MLP().double(), comm)
        (inputs, targets) = my_part(comm, sample_batches(MLP(), 1, 12, dtype=torch.float64)[0])
        for _ in range(2):  # a second step, with whatever the first one left
            wrapped.zero_grad(set_to_none=to_none)
            comm.ledger.clear()
            for i in range(3):
                with wrapped.no_sync() if i < 2 else nullcontext():
                    loss = F.cross_entropy(wrapped(inputs[i::3]), targets[i::3]) / 3
                    loss.backward()
                assert bool(len(comm.ledger)) is (i == 2)
        return gradients(wrapped)

    wanted = whole_batch_gradients(MLP().double(), 12)
    for got in ranks.run(2, run):
        assert_equal(got, wanted)


@pytest.mark.parametrize("rung", RUNGS)
def test_gradients_that_nobody_zeroes_add_up(ranks, rung: Any) -> None:
    def run(comm):
        wrapped = rung(MLP().double(), comm)
        inputs, targets = my_part(comm, sample_batches(MLP(), 1, 6, dtype=torch.float64)[0])
        for _ in range(3):
            F.cross_entropy(wrapped(inputs), targets).backward()
        return gradients(wrapped)

    for got in ranks.run(2, run):
        assert_equal(got, [3 * g for g in whole_batch_gradients(MLP().double()) if g is not None])


def test_two_forwards_and_one_backward(ranks) -> None:
    def run(comm):
        wrapped = BucketedDDP(MLP().double(), comm)
        inputs, targets = my_part(comm, sample_batches(MLP(), 1, 6, dtype=torch.float64)[0])
        (F.cross_entropy(wrapped(inputs), targets) + F.cross_entropy(wrapped(inputs), targets)).backward()
        return gradients(wrapped)

    for got in ranks.run(2, run):
        assert_equal(got, [2 * g for g in whole_batch_gradients(MLP().double()) if g is not None])


# --- unusual models


class Branches(nn.Module):
    """Uses another layer on each rank, and one on none. Outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor, way: str) -> dict[str, Any]:
        return {"out": [getattr(self, way)(inputs)], "way": way}


@pytest.mark.parametrize("rung", RUNGS)
def test_parameters_unused_on_some_ranks_and_on_all(ranks, rung: Any) -> None:
    def run(comm):
        wrapped = rung(Branches(), comm, find_unused_parameters=True)
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(torch.ones(1, 3), "left" if comm.rank == 0 else "right")["out"][0].sum().backward()
        return gradients(wrapped)

    third = torch.tensor(1 / 3)
    for left, left_bias, right, right_bias, never, never_bias in ranks.run(3, run):
        torch.testing.assert_close(left, third.expand(2, 3))
        torch.testing.assert_close(right, (2 * third).expand(2, 3))
        torch.testing.assert_close(left_bias + right_bias, torch.ones(2))
        assert never is None and never_bias is None


def test_unused_parameters_are_found_in_the_graph() -> None:
    model = Branches()
    names = {p: name for name, p in model.named_parameters()}
    unused = unused_parameters(model(torch.ones(1, 3), "left"), model.parameters())
    assert [names[p] for p in unused] == ["right.weight", "right.bias", "never.weight", "never.bias"]
    assert unused_parameters((model.left.weight,), [model.left.weight]) == []


@pytest.mark.parametrize("rung", RUNGS)
def test_strided_scalar_empty_and_mixed_parameters(ranks, rung: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.across = nn.Parameter(torch.randn(4, 3).t())  # columns side by side
            self.gaps = nn.Parameter(torch.randn(6, 6)[::2, ::3])
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
            self.nothing = nn.Parameter(torch.empty(0))
            self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            image = self.conv((x @ self.across).reshape(len(x), 2, 2, 1).expand(-1, -1, -1, 2))
            return (image.sum() + (x @ self.gaps).sum()) * self.scale.float() + self.nothing.sum()

    def run(comm):
        wrapped, inputs = rung(Odd(), comm), torch.arange(12.0).view(4, 3)
        wrapped(inputs[2 * comm.rank :][:2]).backward()
        return gradients(wrapped), [p.grad.stride() == p.stride() for p in wrapped.parameters()]

    whole = Odd()
    whole(torch.arange(12.0).view(4, 3)).backward()
    for got, _ in ranks.run(2, run):
        assert_equal([2 * g for g in got], gradients(whole), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rung", RUNGS)
def test_world_of_one(ranks, rung: Any) -> None:
    def run(comm):
        wrapped = one_backward(comm, rung, MLP(unused=True), find_unused_parameters=True)
        with wrapped.join():
            wrapped(torch.zeros(1, 57)).sum().backward()
        assert comm.ledger.bytes_sent == 0
        return gradients(one_backward(comm, rung, MLP().double()))

    assert_equal(ranks.run(1, run)[0], whole_batch_gradients(MLP().double()))


# --- ranks with different numbers of batches


@pytest.mark.parametrize("rung", [*RUNGS, "torch"])
@pytest.mark.parametrize("by_initial", [True, False])
def test_join_as_torchs(ranks, rung: Any, by_initial: bool) -> None:
    """Ranks with 1, 2 and 4 batches. Each model equals, in the end, the one made of the same sums by hand."""
    counts = [1, 2, 4]

    def run(comm):
        model = MLP().double()
        wrapped = (
            DistributedDataParallel(model)
            if rung == "torch"
            else rung(model, comm, find_unused_parameters=True)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = sample_batches(MLP(), 12, 2, dtype=torch.float64)[comm.rank :: 3][: counts[comm.rank]]
        with wrapped.join(divide_by_initial_world_size=by_initial):
            for inputs, targets in batches:
                optimizer.zero_grad()
                F.cross_entropy(wrapped(inputs), targets).backward()
                optimizer.step()
        return model.state_dict()

    by_hand = MLP().double()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    batches = sample_batches(MLP(), 12, 2, dtype=torch.float64)
    for step in range(4):
        optimizer.zero_grad()
        active = [rank for rank in range(3) if counts[rank] > step]
        for rank in active:
            inputs, targets = batches[3 * step + rank]
            (F.cross_entropy(by_hand(inputs), targets) / (3 if by_initial else len(active))).backward()
        optimizer.step()
    for state in ranks.run(3, run):
        assert_equal(list(state.values()), list(by_hand.state_dict().values()))


def test_join_takes_the_buffers_of_a_rank_that_trains(ranks) -> None:
    def run(comm):
        wrapped = BucketedDDP(DigitsCNN(3, batch_norm=True), comm)
        with wrapped.join() as join:
            for _ in range(1 + 2 * comm.rank):
                wrapped(torch.randn(4, 1, 8, 8)).sum().backward()
        assert join.num_active == 1 and wrapped.num_contributing == 2
        return wrapped.state_dict()

    first, second = ranks.run(2, run)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["features.1.num_batches_tracked"] == 3


# --- what is wrong, and what is said

BATCH = (torch.randn(4, 57), torch.tensor([0, 1, 2, 3]))


def train_once(wrapped: nn.Module) -> None:
    F.cross_entropy(wrapped(BATCH[0]), BATCH[1]).backward()


def twice(comm, rung):
    loss = F.cross_entropy(rung(MLP(), comm)(BATCH[0]), BATCH[1])
    loss.backward(retain_graph=True)
    loss.backward()


def past_the_wrapper(comm, rung):
    wrapped = rung(MLP(), comm)
    train_once(wrapped)
    train_once(wrapped.module)


def frozen_later(comm, rung):
    wrapped = rung(MLP(), comm)
    wrapped.module.first.weight.requires_grad_(False)
    train_once(wrapped)


def new_head(comm, rung):
    wrapped = rung(MLP(), comm)
    wrapped.module.head = nn.Linear(19, 7)
    train_once(wrapped)


def more_layers(comm, rung):
    wrapped = rung(MLP(), comm)
    wrapped.module.extra = nn.Linear(2, 2)
    train_once(wrapped)


def halved(comm, rung):
    wrapped = rung(MLP(), comm)
    wrapped.bfloat16()
    train_once(wrapped)


def other_sizes(comm, rung):
    rung(MLP(hidden=19 + comm.rank), comm)


def other_dtypes(comm, rung):
    rung(MLP().to([torch.float32, torch.float64][comm.rank]), comm)


def frozen_on_one(comm, rung):
    rung(MLP(frozen=comm.rank == 1), comm)


def one_layer_more(comm, rung):
    rung(MLP(unused=comm.rank == 1), comm)


def none_on_one_rank(comm, rung):
    wrapped = rung(Branches(), comm)
    outputs = wrapped(torch.ones(1, 3), "left")["out"][0]
    outputs.sum().backward()


def nested_join(comm, rung):
    wrapped = rung(MLP(), comm)
    with wrapped.join(), wrapped.join():
        pass


ERRORS = [
    (twice, "RuntimeError: rank .: a gradient of .* came that no forward of the wrapper belongs to"),
    (past_the_wrapper, "RuntimeError: rank .: a gradient of .*did forward run on model.module"),
    (
        frozen_later,
        "RuntimeError: rank .: the model changed after it was wrapped: first.weight is gone or frozen",
    ),
    (new_head, "the model changed after it was wrapped: head.weight is another"),
    (more_layers, "the model changed after it was wrapped: extra.weight is new or trained only now"),
    (
        halved,
        r"the model changed after it was wrapped: first.weight was \[19, 57\] .* and is \[19, 57\] torch.bfloat",
    ),
    (
        other_sizes,
        r"rank 1: module: expected the same model as rank 0's; .*'first.weight: \[20, 57\].*\[19, 57\]",
    ),
    (
        other_dtypes,
        "rank 1: module: expected the same model.* torch.float64' where rank 0 has .*torch.float32",
    ),
    (frozen_on_one, "rank 1: module: expected the same model.*frozen' where rank 0"),
    (one_layer_more, "rank 1: module: expected the same model.*spare.weight.* where rank 0 has 'nothing'"),
    (
        none_on_one_rank,
        "backward gave no gradient to right.weight, right.bias, never.weight, never.bias: forward",
    ),
    (nested_join, r"join\(\): the model is inside a join already"),
    (lambda comm, rung: rung("MLP", comm), "TypeError: rank .: module: expected an nn.Module, got str"),
    (
        lambda comm, rung: rung(MLP().requires_grad_(False), comm),
        "expected a parameter with requires_grad=True",
    ),
    (lambda comm, rung: rung(nn.LazyLinear(3), comm), "weight has no shape yet"),
    (lambda comm, rung: rung(nn.Linear(3, 3, device="meta"), comm), "expected its parameters on cpu"),
]


@pytest.mark.parametrize(("mistake", "message"), ERRORS)
def test_mistakes_are_named(mistake: Callable, message: str) -> None:
    with pytest.raises(RankError, match=message):
        launch(mistake, BucketedDDP, world_size=2, show="none")


@pytest.mark.parametrize("rung", [PerParameterDDP, FlatDDP])
@pytest.mark.parametrize("mistake", [twice, past_the_wrapper, none_on_one_rank])
def test_the_lower_rungs_say_the_same(rung: Any, mistake: Callable) -> None:
    with pytest.raises(RankError, match=r"RuntimeError: rank .: (a gradient of|backward gave no gradient)"):
        launch(mistake, rung, world_size=2, show="none")


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0}, {"first_bucket_mb": -1.0}])
def test_caps(options: dict[str, float]) -> None:
    with pytest.raises(RankError, match="_mb: expected a number of MiB above 0, got"):
        launch(lambda comm: BucketedDDP(MLP(), comm, **options), world_size=1, show="none")


def test_a_rank_that_leaves_early_is_named() -> None:
    """Without Join, a rank with fewer batches: the report says who waits for whom."""

    def run(comm):
        wrapped = BucketedDDP(MLP(), comm)
        for _ in range(2 + comm.rank):
            train_once(wrapped)

    with pytest.raises(RanksHung, match=r"rank 1.*all_reduce"):
        launch(run, world_size=2, timeout=1.5, show="none")


def test_torchs_broadcast_of_buffers_is_seen_by_the_report() -> None:
    """It starts from C++ and never passes the Communicator."""

    def run(comm):
        wrapped = DistributedDataParallel(DigitsCNN(3, batch_norm=True))
        if comm.rank == 0:
            wrapped(torch.zeros(2, 1, 8, 8))
        comm.all_reduce(torch.ones(1))

    with pytest.raises(
        RanksHung, match="rank 0 called broadcast_coalesced, but rank 1 called all_reduce of 1 x"
    ):
        launch(run, world_size=2, timeout=1.5, show="none")


# --- how much was hidden


def test_overlap_is_read_from_a_trace_by_hand() -> None:
    """Backward 0-10 with a wait 8-10; all-reduces 2-5, 4-6 (two at once), 7-10; another before backward."""
    events = [
        Event(0, "backward", 0.0, 10.0),
        Event(0, "wait for gradients", 8.0, 10.0, "wait"),
        *(Event(0, "all_reduce", start, end, "comm") for start, end in ((2, 5), (4, 6), (7, 10), (-3, -1))),
        Event(0, "exchange", 0.0, 10.0, "comm"),
    ]
    overlap = measure_overlap(events)
    assert overlap == Overlap(compute_s=8.0, comm_s=7.0, hidden_s=5.0, exposed_s=2.0)
    assert overlap.share == 5 / 7
    with pytest.raises(ValueError, match='a span "backward"'):
        measure_overlap(events[1:])
    assert measure_overlap(events[:1]).share == 0.0


@pytest.mark.parametrize(("rung", "hides"), [(FlatDDP, False), (BucketedDDP, True)])
def test_only_buckets_hide_anything(ranks, rung: Any, hides: bool) -> None:
    def run(comm):
        wrapped = rung(MLP(hidden=190), comm, **({"bucket_cap_mb": 0.05} if hides else {}))
        inputs, targets = my_part(comm, sample_batches(MLP(hidden=190), 1, 64)[0])
        loss = F.cross_entropy(wrapped(inputs), targets)
        with comm.span("backward"):
            loss.backward()

    overlap = measure_overlap(ranks.run(2, run).trace.rank(0))
    assert (overlap.hidden_s > 0) is hides and overlap.comm_s > 0


@pytest.mark.parametrize("kind", ["a part named module", "in a container"])
def test_any_wrappers_state_can_be_loaded_again(ranks, kind: str) -> None:
    def run(comm):
        if kind == "in a container":
            outer: Any = nn.ModuleDict({"g": BucketedDDP(nn.Linear(2, 2), comm)})
        else:
            outer = BucketedDDP(nn.ModuleDict({"module": nn.Linear(2, 2)}), comm)
        saved = {name: tensor + 1 for name, tensor in outer.state_dict().items()}
        return outer.load_state_dict(saved), saved, outer.state_dict()

    for result, saved, loaded in ranks.run(2, run):
        assert not result.missing_keys and not result.unexpected_keys
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_the_overlap_of_several_ranks_is_none() -> None:
    events = [Event(rank, "backward", 0.0, 1.0) for rank in (0, 1)]
    with pytest.raises(ValueError, match=r"expected one rank's, got those of ranks \[0, 1\]"):
        measure_overlap(events)


def test_a_large_sum_of_losses_in_float16(ranks) -> None:
    def run(comm):
        return weighted_loss(comm, torch.tensor(40000.0, dtype=torch.float16), 40000).item()

    assert ranks.run(2, run) == [1.0, 1.0]


# --- unusual use


def test_a_look_inside_no_sync_leaves_an_earlier_forward_averaged(ranks) -> None:
    def run(comm):
        model = nn.Linear(6, 2)
        nn.init.ones_(model.weight)
        wrapped = BucketedDDP(model, comm)
        inputs = torch.full((4, 6), comm.rank + 1.0)
        loss = wrapped(inputs).sum()
        with wrapped.no_sync():
            wrapped(inputs)
        loss.backward()
        return model.weight.grad[0, 0].item()

    assert ranks.run(2, run) == [6.0, 6.0]


@pytest.mark.parametrize("first", ["the averaged one", "the local one"])
def test_a_backward_belongs_to_its_forward_in_any_order(ranks, first: str) -> None:
    """Forward outside no_sync, forward inside; then the two backwards."""

    def run(comm):
        model = nn.Linear(1, 1, bias=False)
        wrapped = BucketedDDP(model, comm)
        averaged = wrapped(torch.full((1, 1), comm.rank + 1.0)).sum()
        with wrapped.no_sync():
            local = wrapped(torch.full((1, 1), 10 * (comm.rank + 1.0))).sum()
        seen = []
        for loss in (averaged, local) if first == "the averaged one" else (local, averaged):
            loss.backward()
            seen.append(model.weight.grad.item())
        return seen

    # Averaged: (1 + 2) / 2; local: 10 and 20. The average takes along what has been added up before.
    wanted = [[1.5, 11.5], [1.5, 21.5]] if first == "the averaged one" else [[10.0, 16.5], [20.0, 16.5]]
    assert ranks.run(2, run) == wanted


def test_no_sync_sends_nothing_after_a_forward_without_backward(ranks) -> None:
    def run(comm):
        model = nn.Linear(1, 1, bias=False)
        wrapped = BucketedDDP(model, comm)
        wrapped(torch.ones(1, 1))  # a loss that was NaN, and left alone
        comm.ledger.clear()
        with wrapped.no_sync():
            wrapped(torch.full((1, 1), float(comm.rank))).sum().backward()
        return model.weight.grad.item(), len(comm.ledger)

    assert ranks.run(2, run) == [(0.0, 0), (1.0, 0)]


def after_a_local_forward_without_backward(comm, rung):
    wrapped = rung(MLP(), comm)
    with wrapped.no_sync():
        wrapped(BATCH[0])
        train_once(wrapped)
    train_once(wrapped.module)


def both_sides_of_no_sync(comm, rung):
    wrapped = rung(MLP(), comm)
    loss = wrapped(BATCH[0]).sum()
    with wrapped.no_sync():
        (loss + wrapped(BATCH[0]).sum()).backward()


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class SaysLittle(nn.Linear):
    def forward(self, inputs):
        return Opaque(super().forward(inputs))


def opaque_outputs(comm, rung):
    wrapped = rung(SaysLittle(57, 3), comm, find_unused_parameters=True)
    wrapped(BATCH[0])


def one_output_of_two(comm, rung):
    wrapped = rung(TwoHeads(), comm, find_unused_parameters=True)
    wrapped(torch.ones(1, 3))[0].sum().backward()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs):
        return self.a(inputs), self.b(inputs)


def growing_buffer(comm, rung):
    model = MLP()
    model.register_buffer("history", torch.zeros(2))
    wrapped = rung(model, comm)
    model.history = torch.zeros(3)
    train_once(wrapped)


def expanded_buffer(comm, rung):
    model = MLP()
    model.register_buffer("scale", torch.ones(1).expand(2))
    rung(model, comm)


def after_no_sync_past_the_wrapper(comm, rung):
    wrapped = rung(MLP(), comm)
    with wrapped.no_sync():
        train_once(wrapped)
    train_once(wrapped.module)


def backward_that_raised(comm, rung):
    wrapped = rung(MLP(), comm)
    wrapped.module.second.bias.register_hook(lambda gradient: gradient[99])
    try:
        train_once(wrapped)
    except IndexError:
        train_once(wrapped)


def after_a_missing_gradient(comm, rung):
    wrapped = rung(MLP(unused=True), comm)
    try:
        train_once(wrapped)
    except RuntimeError:
        train_once(wrapped)


class Breaks:
    def wait(self):
        raise OSError("the link is down")


def after_a_hook_that_raised(comm, rung):
    wrapped = rung(MLP(), comm, comm_hook=lambda comm, flat: Breaks())
    try:
        train_once(wrapped)
    except OSError:
        train_once(wrapped)


def buffer_elsewhere(comm, rung):
    model = MLP()
    model.register_buffer("mask", torch.empty(3, device="meta"))
    rung(model, comm)


def shared_by_two(comm, rung):
    shared = nn.Linear(6, 8)
    first = rung(nn.Sequential(shared, nn.Linear(8, 2)), comm)
    return first, rung(nn.Sequential(shared, nn.Linear(8, 3)), comm)


def other_strides(comm, rung):
    model = nn.Linear(4, 6)
    if comm.rank == 1:
        model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    rung(model, comm)


def graph_of_the_graph(comm, rung):
    wrapped = rung(MLP(), comm)
    F.cross_entropy(wrapped(BATCH[0]), BATCH[1]).backward(create_graph=True)


def sparse(comm, rung):
    wrapped = rung(nn.Embedding(5, 3, sparse=True), comm)
    wrapped(torch.tensor([1, 2])).sum().backward()


def another_buffer(comm, rung):
    wrapped = rung(DigitsCNN(3, batch_norm=True), comm)
    wrapped.module.features[1].running_mean = torch.zeros(4)
    wrapped(torch.zeros(2, 1, 8, 8))


def old_wrapper(comm, rung):
    model = MLP()
    wrapped, _ = rung(model, comm), rung(model, comm)
    train_once(wrapped)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            after_no_sync_past_the_wrapper,
            "a gradient of head.bias came that no forward of the wrapper belongs to",
        ),
        (backward_that_raised, "RuntimeError: rank .: the last backward did not end"),
        (shared_by_two, "0.weight is averaged by another wrapper already"),
        (lambda comm, rung: rung(rung(MLP(), comm), comm), "BucketedDDP in it averages already"),
        (other_strides, r"rank 1: .*strides \[1, 6\]' where rank 0 has"),
        (graph_of_the_graph, "NotImplementedError: rank .: backward.create_graph=True."),
        (sparse, "NotImplementedError: rank .: the gradient of weight is sparse"),
        (
            another_buffer,
            r"the model changed after it was wrapped: buffer features.1.running_mean was \[3\] .* and is \[4\]",
        ),
        (old_wrapper, "the module was unwrapped, or wrapped again, since; use the new wrapper"),
        (after_a_missing_gradient, "RuntimeError: rank .: the last backward did not end"),
        (after_a_hook_that_raised, "RuntimeError: rank .: the last backward did not end"),
        (
            lambda comm, rung: rung(MLP(), comm, find_unused_parameters="no"),
            "find_unused_parameters: expected True or",
        ),
        (lambda comm, rung: rung(MLP(), comm, bucket_cap_mb=True), "bucket_cap_mb: expected a number of MiB"),
        (
            buffer_elsewhere,
            "expected its parameters and buffers on cpu, this rank's device, but mask is on meta",
        ),
        (
            after_a_local_forward_without_backward,
            "a gradient of .* came that no forward of the wrapper belongs to",
        ),
        (both_sides_of_no_sync, "one backward of two forwards, one of them inside no_sync"),
        (opaque_outputs, "TypeError: rank .: forward: expected a tensor, or .* got Opaque"),
        (one_output_of_two, "no gradient to b.weight, b.bias: forward returned a tensor that depends on it"),
        (growing_buffer, r"buffer history was \[2\] torch.float32 and is \[3\] torch.float32"),
        (expanded_buffer, r"scale is expanded: .* clone\(\) it first"),
        (lambda comm, rung: rung(MLP(), comm.group), "TypeError: comm: expected this rank's Communicator"),
        (lambda comm, rung: rung(nn.ReLU(), comm), "there is none to train"),
        (lambda comm, rung: rung(MLP(), comm, comm_hook=3), "comm_hook: expected a function"),
        (
            lambda comm, rung: train_once(rung(MLP(), comm, comm_hook=lambda c, f: None)),
            "something with wait",
        ),
        (lambda comm, rung: copy.deepcopy(rung(MLP(), comm)), "TypeError: a wrapped model cannot be copied"),
    ],
)
def test_these_are_refused(mistake: Callable, message: str) -> None:
    with pytest.raises(RankError, match=message):
        launch(mistake, BucketedDDP, world_size=2, timeout=10, show="none")


@pytest.mark.parametrize("rung", RUNGS)
def test_wrapping_again_replaces_the_wrapper(ranks, rung: Any) -> None:
    def run(comm):
        model = MLP().double()
        rung(model, comm)
        model.first.requires_grad_(False)
        return gradients(one_backward(comm, rung, model))

    model = MLP().double()
    model.first.requires_grad_(False)
    wanted = whole_batch_gradients(model)
    for got in ranks.run(2, run):
        assert_equal(got, wanted)


def test_unwrapped_a_module_is_free_again(ranks) -> None:
    def run(comm):
        model = one_backward(comm, BucketedDDP, MLP().double()).unwrap()
        model.zero_grad()
        torch.full((), comm.rank + 1.0, dtype=torch.float64).mul(model.head.bias.sum()).backward()
        alone = model.head.bias.grad[0].item()
        return alone, gradients(one_backward(comm, torchs, model.zero_grad() or model))

    wanted = whole_batch_gradients(MLP().double())
    for rank, (alone, got) in enumerate(ranks.run(2, run)):
        assert alone == rank + 1
        assert_equal(got, wanted)


def torchs(model, comm):
    return DistributedDataParallel(model, process_group=comm.group)


@pytest.mark.parametrize("rung", [*RUNGS, "torch"])
def test_two_forwards_of_a_net_with_buffers_and_one_backward(ranks, rung: Any) -> None:
    """The discriminator of a GAN. A buffer that is copied to in between must not spoil the first forward."""

    def train(model, called):
        real, fake = (sample_batches(model, 2, 4, dtype=torch.float64)[i][0] for i in range(2))
        (called(real).pow(2).sum() + called(fake).sum()).backward()
        return gradients(model)

    def run(comm):
        model = DigitsCNN(3, batch_norm=True).double()
        return train(model, DistributedDataParallel(model) if rung == "torch" else rung(model, comm))

    model = DigitsCNN(3, batch_norm=True).double()
    wanted = train(model, model)  # all ranks have the same batches here
    for got in ranks.run(2, run):
        assert_equal(got, wanted)


def test_outputs_in_a_dataclass() -> None:
    layer = nn.Linear(2, 2)
    assert unused_parameters(Outputs(layer(torch.ones(1, 2)), "x"), layer.parameters()) == []


@dataclass
class Outputs:
    logits: torch.Tensor
    name: str


@pytest.mark.parametrize("count", [1.5, -1, True, "3", torch.tensor(1.5)])
def test_counts_that_are_none(count: Any) -> None:
    with pytest.raises(RankError, match="TypeError: rank 0: count: expected a number of samples"):
        launch(weighted_loss, torch.tensor(1.0), count, world_size=1, show="none")


def test_losses_that_have_not_been_added_up() -> None:
    with pytest.raises(RankError, match=r"loss_sum: expected a scalar.*got \(3,\)"):
        launch(weighted_loss, torch.ones(3), 3, world_size=1, show="none")


def test_a_wrapped_models_module_and_parameters_can_be_pickled(ranks) -> None:
    """Results of ranks are: no wrapper must hang on them."""

    def run(comm):
        wrapped = one_backward(comm, BucketedDDP, MLP())
        return wrapped.module, wrapped.module.first.weight

    module, weight = ranks.run(2, run)[0]
    assert torch.equal(module.first.weight, weight)
