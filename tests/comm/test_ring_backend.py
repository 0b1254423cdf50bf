"""torch on the course's ring: the same values as gloo, the same training as one process, every byte counted.

What must be equal is computed three ways where that is possible: on the ring, on gloo, and in one process.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from course_lib import VirtualHosts, launch
from course_lib.comm import collectives, ring_backend
from course_lib.comm.torch_collectives import torch_all_gather, torch_reduce_scatter
from course_lib.plan import traffic
from course_lib.runtime.errors import Failure
from course_lib.runtime.report import is_consequence, is_timeout
from tests.comm.rings import data, fails, mlp

WORLDS = [1, 2, 3, 4]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
BITWISE = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
LENGTHS = [0, 1, 5, 1857]


# --- values


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Other values on each rank: small whole numbers, so that sums are exact in every dtype."""
    return ((torch.arange(length) * 7 + rank * 3) % 5 + 1).to(dtype)


def reductions(comm) -> list[torch.Tensor]:
    found = []
    for dtype, op, length in itertools.product(DTYPES, OPS, LENGTHS):
        if length != 5 and dtype != torch.float32:
            continue
        tensor = values(comm.rank, length, dtype)
        dist.all_reduce(tensor, op)
        reduced = values(comm.rank, length, dtype)
        dist.reduce(reduced, comm.world_size - 1, op)
        whole = values(comm.rank, length * comm.world_size, dtype)
        part = torch.empty(length, dtype=dtype)
        torch_reduce_scatter(part, whole, op)
        listed = torch.empty(length, dtype=dtype)
        dist.reduce_scatter(listed, list(whole.split(length)) if length else [whole] * comm.world_size, op)
        found += [tensor, part, listed, *([reduced] if comm.rank == comm.world_size - 1 else [])]
    for dtype, op in itertools.product([torch.int64, torch.uint8], BITWISE):
        found.append(values(comm.rank, 5, dtype))
        dist.all_reduce(found[-1], op)
    return found


def copies(comm) -> list[torch.Tensor]:
    N, found = comm.world_size, []
    for dtype, length in [
        *((dtype, 5) for dtype in DTYPES),
        *((torch.float32, length) for length in LENGTHS),
    ]:
        mine = values(comm.rank, length, dtype)
        root, sent = N - 1, mine.clone()
        dist.broadcast(sent, root)
        whole, pieces = torch.empty(N * length, dtype=dtype), [torch.empty_like(mine) for _ in range(N)]
        torch_all_gather(whole, mine)
        dist.all_gather(pieces, mine)
        gathered = [torch.empty_like(mine) for _ in range(N)]
        dist.gather(mine, gathered if comm.rank == root else None, root)
        scattered = torch.empty_like(mine)
        dist.scatter(scattered, pieces if comm.rank == root else None, root)
        swapped = torch.empty(N * length, dtype=dtype)
        dist.all_to_all_single(swapped, values(comm.rank, N * length, dtype))
        found += [sent, whole, *pieces, scattered, swapped, *(gathered if comm.rank == root else [])]
    return found


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", [reductions, copies])
def test_values_are_gloos(pools, case, world_size):
    ours, theirs = pools.run(world_size, "ring", case), pools.run(world_size, "gloo", case)
    for rank, (mine, gloos) in enumerate(zip(ours, theirs, strict=True)):
        for i, (a, b) in enumerate(zip(mine, gloos, strict=True)):
            assert a.dtype == b.dtype, (rank, i)
            assert torch.equal(a, b), (rank, i, a, b)


def shapes(comm) -> None:
    """What gloo cannot be asked: averages, strides, uneven pieces."""
    N, r = comm.world_size, comm.rank
    mean = torch.tensor([1.0, float(r)])
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.equal(mean, torch.tensor([1.0, (N - 1) / 2]))
    part = torch.empty(3)
    torch_reduce_scatter(part, torch.full((3 * N,), float(r)), dist.ReduceOp.AVG)
    assert torch.equal(part, torch.full((3,), (N - 1) / 2))

    memory = torch.full((4, 6), -1.0)
    memory[:, ::2] = r
    dist.all_reduce(memory[:, ::2])
    assert torch.equal(memory[:, ::2], torch.full((4, 3), N * (N - 1) / 2))
    assert bool((memory[:, 1::2] == -1).all())
    turned = torch.arange(6.0).reshape(2, 3).t() + r
    dist.broadcast(turned, N - 1)
    assert torch.equal(turned, torch.arange(6.0).reshape(2, 3).t() + N - 1)
    pieces = [torch.empty(3, 2).t() for _ in range(N)]
    dist.all_gather(pieces, torch.arange(6.0).reshape(2, 3) * r)
    assert all(torch.equal(piece, torch.arange(6.0).reshape(2, 3) * i) for i, piece in enumerate(pieces))

    for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn):
        strange = torch.ones(5) * (torch.arange(5) == r)
        got = [torch.empty(5, dtype=dtype) for _ in range(N)]
        dist.all_gather(got, strange.to(dtype))
        assert all(
            piece.to(torch.float32).tolist() == [float(i == j) for i in range(5)]
            for j, piece in enumerate(got)
        )

    uneven = [torch.empty(i) for i in range(N)]
    dist.all_gather(uneven, torch.full((r,), float(r)))
    assert all(torch.equal(piece, torch.full((i,), float(i))) for i, piece in enumerate(uneven))
    lists = [torch.empty(2, i + 1) for i in range(N)]
    dist.all_to_all(lists, [torch.full((2, r + 1), 10.0 * r + to) for to in range(N)])
    assert all(torch.equal(got, torch.full((2, i + 1), 10.0 * i + r)) for i, got in enumerate(lists))
    out = torch.empty(sum(range(N)), 2)
    dist.all_to_all_single(out, torch.full((r * N, 2), float(r)), list(range(N)), [r] * N)
    assert out[:, 0].tolist() == [float(i) for i in range(N) for _ in range(i)]

    with torch.inference_mode():
        inferred = torch.ones(3)
        dist.all_reduce(inferred)
        assert inferred.tolist() == [N] * 3
        dist.all_reduce(inferred, async_op=True).wait()
    dist.all_reduce(inferred)
    assert inferred.tolist() == [N**3] * 3
    parameter = nn.Parameter(torch.ones(3))
    dist.all_reduce(parameter)
    assert parameter.tolist() == [N] * 3


def objects(comm) -> None:
    N, r = comm.world_size, comm.rank
    every: list = [None] * N
    dist.all_gather_object(every, {"rank": r, "text": "x" * r * 100})
    assert every == [{"rank": i, "text": "x" * i * 100} for i in range(N)]
    told = [("from", r), None]
    dist.broadcast_object_list(told, N - 1)
    assert told[0] == ("from", N - 1)
    got: list = [None] * N
    dist.gather_object(r * r, got if r == 0 else None, 0)
    assert r > 0 or got == [i * i for i in range(N)]
    mine: list = [None]
    dist.scatter_object_list(mine, [f"for {i}" for i in range(N)], 0)
    assert mine == [f"for {r}"]


def messages(comm) -> None:
    """The user's own messages go on beside collectives: with tags, batched, from anybody, by the Communicator."""
    N, r = comm.world_size, comm.rank
    if N == 1:
        return
    right, left = (r + 1) % N, (r - 1) % N
    total = torch.full((300_000,), float(r))
    work = dist.all_reduce(total, async_op=True)
    for tag in (0, 0, 7):
        came = torch.empty(5)
        receiving = dist.irecv(came, left, tag=tag)
        dist.send(torch.full((5,), float(r)), right, tag=tag)
        receiving.wait()
        assert came.tolist() == [left] * 5
    came = torch.empty(2)
    batch = [dist.P2POp(dist.isend, torch.full((2,), float(r)), right), dist.P2POp(dist.irecv, came, left)]
    for request in dist.batch_isend_irecv(batch):
        request.wait()
    assert came.tolist() == [left] * 2
    comm.exchange(torch.tensor([r]), right, source := torch.empty(1, dtype=torch.int64), left)
    assert source.item() == left
    if r == 0:
        seen = {dist.recv(torch.empty(1), tag=3) for _ in range(N - 1)}
        assert seen == set(range(1, N))
    else:
        dist.send(torch.ones(1), 0, tag=3)
    work.wait()
    assert total[0] == N * (N - 1) / 2


def asynchronous(comm) -> None:
    N = comm.world_size
    tensors = [torch.full((1000,), float(comm.rank + i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    late = dist.barrier(async_op=True)
    values = [work.get_future().then(lambda f: f.value()[0].sum().item()) for work in works]
    late.wait()
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    for i, (tensor, work, value) in enumerate(zip(tensors, works, values, strict=True)):
        expected = float(sum(range(N)) + N * i)
        work.wait()
        work.wait(datetime.timedelta(seconds=5))
        assert work.result()[0] is tensor
        assert tensor[0] == expected
        assert value.wait() == 1000 * expected


def coalesced(comm) -> None:
    N = comm.world_size
    tensors = [torch.full((3,), float(i)) for i in range(4)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert [tensor[0].item() for tensor in tensors] == [i * N for i in range(4)]
    parts, wholes = [torch.empty(2) for _ in range(3)], [torch.ones(2 * N) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for part, whole in zip(parts, wholes, strict=True):
            torch_reduce_scatter(part, whole)
    manager.wait()
    assert all(part.tolist() == [N, N] for part in parts)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
    manager.wait()


def subgroups(comm) -> float:
    """Overlapping groups, all of them busy at once; each rank asks in another order."""
    N = comm.world_size
    pairs = [dist.new_group([i, i + 1]) for i in range(N - 1)]
    everybody = dist.new_group(list(range(N)))
    groups = [g for g in (*pairs, everybody, dist.group.WORLD) if g != dist.GroupMember.NON_GROUP_MEMBER]
    if comm.rank % 2:
        groups.reverse()
    tensors = [torch.ones(50_000) for _ in groups for _ in range(5)]
    asked = [group for group in groups for _ in range(5)]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, asked, strict=True)]
    for work in works:
        work.wait()
    assert all(t[0] == g.size() for t, g in zip(tensors, asked, strict=True))
    half = comm.subgroup(range(0, N, 2))
    if half is not None:
        half.all_reduce(total := torch.ones(3), "avg")
        assert total.tolist() == [1.0] * 3
    return sum(thread.name.startswith("ring") for thread in threading.enumerate())


@pytest.mark.parametrize("world_size", WORLDS)
def test_more_than_gloo_can_be_asked(pools, world_size):
    for case in (shapes, objects, messages, asynchronous, coalesced):
        pools.run(world_size, "ring", case)


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_groups_work_at_the_same_time(world_size):
    # Not in a pool: after a group that its members alone have made, torch's meshes hang (on gloo too).
    results = launch(subgroups, world_size=world_size, backend="ring", show="none")
    assert min(results) >= 3  # a thread for each group


# --- training


class Branches(nn.Module):
    """One of two branches is used, a buffer counts the calls: what DDP has options for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(17, 5), nn.Linear(17, 5)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        self.calls += 1
        return self.branches[which](x)


def train(model: nn.Module, optimizer, rank: int, world_size: int, steps: int = 10) -> list[torch.Tensor]:
    x, y = (part.chunk(world_size)[rank] for part in data())
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    parameters = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
    gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in model.parameters()]
    return parameters + gradients


adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


def alone() -> list[torch.Tensor]:
    model = mlp()
    return train(model, adamw(model.parameters()), 0, 1)


def by_ddp(comm) -> list[torch.Tensor]:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.004)  # several buckets
    return train(model, adamw(model.parameters()), comm.rank, comm.world_size)


def by_zero(comm) -> list[torch.Tensor]:
    model = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return train(model, optimizer, comm.rank, comm.world_size)


def by_fsdp(comm, *mesh: int) -> list[torch.Tensor]:
    """One dimension: sharded. Two: replicated along the first, so two groups of each rank work side by side."""
    model = mlp()
    shape = mesh or (comm.world_size,)
    devices = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=devices)
    fully_shard(model, mesh=devices)
    return train(model, adamw(model.parameters()), comm.rank, comm.world_size)


def assert_close(ours: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    """Ranks add in another order than one process does, so the last bits differ."""
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("way", [by_ddp, by_zero, by_fsdp])
def test_torch_trains_as_one_process_does(pools, way, world_size):
    results = pools.run(world_size, "ring", way)
    assert_close(results[-1], alone())
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))


def test_ddp_trains_as_on_gloo(pools):
    for world_size in (2, 3):
        ours, gloos = (pools.run(world_size, backend, by_ddp) for backend in ("ring", "gloo"))
        assert_close(ours[0], gloos[0])


def test_fully_shard_on_a_mesh_of_two_dimensions(pools):
    assert_close(pools.run(4, "ring", by_fsdp, 2, 2)[-1], alone())


def ddp_options(comm) -> None:
    x, _ = data()
    mine = x.chunk(comm.world_size)[comm.rank]
    plain = Branches()
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    assert model.module.branches[0].weight.equal(plain.branches[0].weight)
    model.module.calls += 10 * comm.rank  # rank 0's value wins at the next forward
    for which in (0, 1, comm.rank % 2):
        model.zero_grad()
        model(mine, which).sum().backward()
        if which == 0 and comm.world_size == 2:
            assert model.module.branches[0].weight.grad is not None
    assert model.module.calls == 3
    ddp = DistributedDataParallel(mlp())
    with ddp.no_sync():
        ddp(mine).sum().backward()
    rows = len(comm.ledger)
    ddp(mine).sum().backward()
    assert comm.world_size == 1 or len(comm.ledger) > rows
    truth = mlp()
    truth(x).sum().backward()
    for p, q in zip(ddp.module.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * q.grad / comm.world_size, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_options_of_ddp(pools, world_size):
    pools.run(world_size, "ring", ddp_options)


def tensor_parallel(comm) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    x = torch.randn(5, 8)
    truth = model(x).detach()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (comm.world_size,)), plan)
    out = model(x)
    out.sum().backward()
    return float((out - truth).abs().max())


def compiled(comm) -> tuple[list[float], list[torch.Tensor]]:
    """torch.compile leaves a group's methods alone, also those that C++ calls."""

    @functools.partial(torch.compile, backend="eager")
    def twice_the_sum(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        dist.all_reduce(y)
        dist.all_reduce(y, async_op=True).wait()
        came = [torch.empty_like(y) for _ in range(comm.world_size)]
        dist.all_gather(came, y)
        return came[-1] + y

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(17, 5), nn.BatchNorm1d(5))  # a buffer, so forward broadcasts
    model = torch.compile(DistributedDataParallel(layers), backend="eager")
    train(model, adamw(model.parameters()), comm.rank, comm.world_size, steps=3)
    return twice_the_sum(torch.ones(2)).tolist(), [p.detach() for p in layers.parameters()]


def test_compiled_code_may_communicate(pools):
    (sums, ours), (others, theirs) = pools.run(2, "ring", compiled)
    assert sums == others == [16.0, 16.0]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_tensor_parallelism(pools):
    assert max(pools.run(2, "ring", tensor_parallel)) < 1e-5


# --- the ledger


def ddp_traffic(comm) -> tuple[list[int], int, int, int, bool, set]:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.004)
    x, _ = data()
    for _ in range(2):  # DDP forms its buckets anew after the first step
        model(x).sum().backward()
    comm.ledger.clear()
    comm.trace.clear()
    model(x).sum().backward()
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    ledger = comm.ledger
    names = {event.name for event in comm.trace}
    exact = all(row.exact for row in ledger)
    return (
        list(map(int, sizes.split(","))),
        ledger.bytes_sent,
        ledger.bytes_received,
        ledger.messages,
        exact,
        names,
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_traffic_of_ddp_is_counted_exactly(pools, world_size):
    for rank, (sizes, sent, received, messages, exact, names) in enumerate(
        pools.run(world_size, "ring", ddp_traffic)
    ):
        assert len(sizes) > 1
        buckets = [traffic.ring_all_reduce_bytes(world_size, size // 4)[rank] for size in sizes]
        assert (sent, received) == tuple(map(sum, zip(*buckets, strict=True)))
        assert messages == len(sizes) * 2 * (world_size - 1)
        assert exact
        assert names == {"ring_all_reduce"}


def counted_once(comm) -> None:
    N, r = comm.world_size, comm.rank
    for call, expected in [
        (lambda: comm.all_reduce(torch.ones(57)), traffic.ring_all_reduce_bytes(N, 57)[r]),
        (lambda: comm.all_reduce(torch.ones(57), "avg"), traffic.ring_all_reduce_bytes(N, 57)[r]),
        (
            lambda: comm.all_reduce(torch.ones(57), async_op=True).wait(),
            traffic.ring_all_reduce_bytes(N, 57)[r],
        ),
        (lambda: dist.all_reduce(torch.ones(57)), traffic.ring_all_reduce_bytes(N, 57)[r]),
        (
            lambda: comm.reduce_scatter(torch.ones(3), torch.ones(3 * N)),
            traffic.ring_reduce_scatter_bytes(N, 3 * N)[r],
        ),
        (
            lambda: comm.all_gather(torch.ones(3 * N), torch.ones(3)),
            traffic.ring_all_gather_bytes(N, 3 * N)[r],
        ),
        (lambda: comm.broadcast(torch.ones(5), N - 1), traffic.broadcast_bytes(N, 5, root=N - 1)[r]),
        (comm.barrier, (0, 0)),
        (lambda: comm.exchange(torch.ones(3), (r + 1) % N, torch.ones(3), (r - 1) % N), (12, 12)),
    ]:
        comm.ledger.clear()
        call()
        assert (comm.ledger.bytes_sent, comm.ledger.bytes_received) == tuple(expected)
        assert all(row.exact and row.group == comm.ranks for row in comm.ledger)


def test_bytes_are_counted_once(pools):
    pools.run(3, "ring", counted_once)


def clock(comm) -> list[float]:
    dist.all_reduce(torch.ones(3))
    return [row.start_s for row in comm.ledger]


def test_each_run_of_a_pool_has_its_own_clock_and_ledger(pools):
    for _ in range(2):
        (starts, _) = pools.run(2, "ring", clock)
        assert len(starts) == 2
        assert all(0 <= start < 5 for start in starts)


# --- the learner's own ring


def passes_whole_tensors(comm, tensor: torch.Tensor, op: str) -> None:
    """A "ring" that is right and wasteful."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    passing, came = tensor.clone(), torch.empty_like(tensor)
    for _ in range(comm.world_size - 1):
        comm.exchange(passing, right, came, left)
        tensor += came
        passing, came = came, passing


def breaks(comm, tensor: torch.Tensor, op: str) -> None:
    raise KeyError("my own mistake")  # the line to be seen


def other_lengths(comm, tensor: torch.Tensor, op: str) -> None:
    comm.exchange(tensor[: 1 + comm.rank], 1 - comm.rank, torch.empty_like(tensor), 1 - comm.rank)


def trains_on(comm, ring) -> tuple[list[torch.Tensor], int]:
    with ring_backend.plugged(all_reduce=ring):
        model = DistributedDataParallel(mlp())
        comm.ledger.clear()
        return train(model, adamw(model.parameters()), comm.rank, comm.world_size), comm.ledger.bytes_sent


def asks_once(comm, ring) -> None:
    with ring_backend.plugged(all_reduce=ring):
        dist.all_reduce(torch.ones(5))


def goes_on(comm) -> str:
    with ring_backend.plugged(all_reduce=breaks), pytest.raises(KeyError):
        dist.all_reduce(torch.ones(5), async_op=True).wait()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(5))
    return str(caught.value)


def test_ddp_trains_on_a_plugged_ring():
    results = launch(trains_on, passes_whole_tensors, world_size=3, backend="ring", show="none")
    assert_close(results[0][0], alone())
    length = sum(p.numel() for p in mlp().parameters())
    # (N-1)·S a step, not a ring's 2(N-1)/N·S. The last rank's: rank 0 also tells the others how DDP forms its buckets.
    assert results[2][1] == 10 * 2 * length * 4


def plugged_others(comm) -> list[str]:
    called = []

    def reduce_scatter(comm, out, tensor, op):
        called.append("reduce_scatter")
        collectives.ring_reduce_scatter(comm, out, tensor, op)

    def all_gather(comm, out, tensor):
        called.append("all_gather")
        collectives.ring_all_gather(comm, out, tensor)

    with ring_backend.plugged(reduce_scatter=reduce_scatter, all_gather=all_gather):
        by_fsdp(comm)
    torch_all_gather(torch.ones(2), torch.ones(1))  # no longer plugged
    return called


def test_fully_shard_runs_on_plugged_functions(pools):
    called = pools.run(2, "ring", plugged_others)[0]
    assert set(called) == {"reduce_scatter", "all_gather"}


def test_an_error_of_a_plugged_ring_shows_its_own_line():
    error = fails(asks_once, breaks)
    assert (error.exc_type, error.exc_message) == ("KeyError", "'my own mistake'")
    assert "# the line to be seen" in str(error)
    error = fails(trains_on, breaks)  # through torch's C++: only the text survives
    assert "KeyError: 'my own mistake'" in str(error)
    assert "test_ring_backend.py" in error.exc_message
    assert "Both ends of a message must have the same length" in str(fails(asks_once, other_lengths))


def test_a_group_that_failed_says_so():
    texts = launch(goes_on, world_size=2, backend="ring", show="none")
    assert all("an earlier collective of this group failed (KeyError: 'my own mistake')" in t for t in texts)


# --- the end, and outside the launcher


def ends(comm) -> tuple[float, float, list[str]]:
    half = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=half)
    began = time.monotonic()
    dist.destroy_process_group(half)
    dist.barrier()
    dist.destroy_process_group()
    return (
        time.monotonic() - began,
        threading.active_count(),
        [t.name for t in threading.enumerate() if "ring" in t.name],
    )


def test_no_thread_is_left():
    for _, alive, names in launch(ends, world_size=2, backend="ring", show="none"):
        assert alive == 1
        assert names == []


SCRIPT = """
import datetime, os, sys, time, torch, torch.distributed as dist
from course_lib.comm import ring_backend

sys.stdout = open(f"{sys.argv[1]}/child" if (child := os.fork()) == 0 else f"{sys.argv[1]}/parent", "w", buffering=1)
rank = int(child == 0)
ring_backend.register()
ring_backend.register()
store = dist.FileStore(sys.argv[1] + "/store", 2)
dist.init_process_group("ring", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=1))
dist.all_reduce(total := torch.tensor([4.0, 4.0 * rank]))
print(total.tolist())
dist.barrier()
if rank == 0:
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print(error)
        try:
            dist.all_reduce(torch.ones(3))
        except RuntimeError as error:
            print(error)
else:
    time.sleep(2.5)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print(error)
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.waitpid(child, 0)[1])
"""


def test_outside_the_launcher_and_its_timeout(tmp_path):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environ, check=True, timeout=60)
    (sum_0, late, again), (sum_1, gone) = (
        (tmp_path / name).read_text().splitlines() for name in ("parent", "child")
    )
    assert sum_0 == sum_1 == "[8.0, 4.0]"
    what = "all_reduce of 3 x float32 sum, ranks [0, 1]"
    assert late == f"rank 0: {what}: wait timeout: no answer within 1.0 s; did every rank call it?"
    assert again.startswith("all_reduce: an earlier collective of this group failed (RuntimeError: rank 0: ")
    assert gone.startswith(f"rank 1: {what}: connection closed by peer: another rank has probably ended")
    # The launcher tells from the words what caused a failure, and what only follows.
    assert is_timeout(Failure(0, "RuntimeError", late))
    assert is_consequence(Failure(1, "RuntimeError", gone))


# --- limited links


def on_links(comm) -> tuple[list[torch.Tensor], int, float]:
    tensor = torch.ones(250_000)
    comm.barrier()
    began = time.monotonic()
    dist.all_reduce(tensor)
    seconds = time.monotonic() - began
    return by_ddp(comm), comm.ledger.bytes_sent, seconds


@pytest.mark.hosts
def test_on_hosts_in_namespaces():
    with VirtualHosts(2, link="400Mbit", how="namespaces") as hosts:
        results = launch(on_links, world_size=2, backend="ring", hosts=hosts, show="none")
        assert_close(results[0][0], alone())
        assert results[0][2] > 0.8 * 1e6 / hosts.bytes_per_s  # 1 MB each way


def test_on_hosts_paced_in_software():
    """torch's own collectives cannot be paced on gloo; on the ring they are messages, so they are."""
    with VirtualHosts(2, link="400Mbit", how="paced") as hosts:
        results = launch(on_links, world_size=2, backend="ring", hosts=hosts, show="none")
        assert_close(results[0][0], alone())
        assert results[0][2] > 0.8 * 1e6 / hosts.bytes_per_s


def test_a_collective_asked_for_by_a_callback_of_another() -> None:
    """As torch's PowerSGD hook does: the group's only thread runs the callback, and must not wait for itself."""

    def run(comm):
        first, second = torch.ones(3), torch.full((2,), comm.rank + 1.0)

        def then(_):
            dist.all_reduce(second)
            return second

        dist.all_reduce(first, async_op=True).get_future().then(then).wait()
        return first.tolist(), second.tolist()

    for first, second in launch(run, world_size=2, backend="ring", timeout=5, show="none"):
        assert first == [2.0] * 3 and second == [3.0] * 2


def test_a_callback_that_waits_for_a_later_collective() -> None:
    """The thread that it stops is the one that would do what it waits for."""

    def run(comm):
        tensors = [torch.full((2,), float(i)) for i in range(4)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]

        def then(_):
            works[2].wait()
            return tensors[1].tolist(), tensors[2].tolist()

        seen = works[0].get_future().then(then).wait()
        works[3].wait()
        dist.all_reduce(last := torch.ones(1))
        return seen, tensors[3].tolist(), last.item()

    for result in launch(run, world_size=2, backend="ring", timeout=5, show="none"):
        assert result == (([2.0] * 2, [4.0] * 2), [6.0] * 2, 2.0)
