"""The parameter servers on 1 to 4 real ranks: equal to one process, the bytes on paper, stale as far as allowed.

One launch for each world runs all synchronous cases; the tests then look at what came out.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from course_lib import RankError, launch
from course_lib.comm import collectives
from course_lib.parallel.parameter_server import (
    AsyncParameterServer,
    AsyncReport,
    ParameterServer,
    ShardedParameterServer,
    may_pull,
    measure_steps,
    sharded_step,
    weighted_mean,
)
from course_lib.parallel.parameter_server.sharded import pull_chunks, push_chunks
from course_lib.plan import server_traffic
from course_lib.plan.partition import chunk_bounds

WORLDS = [1, 2, 3, 4]
STEPS = 4


class Awkward(nn.Module):
    """A tied, a frozen, a scalar and an unused parameter, a buffer, and sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(7, 3)
        self.again = nn.Linear(5, 7)
        self.again.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3, 2))
        self.register_buffer("offset", torch.linspace(-1, 1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x + self.offset))
        return self.last(torch.tanh(self.again(self.frozen(hidden)))) * self.scale


def model(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return Awkward().to(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Momentum and weight decay: a gradient of zero is not the same as none."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def clipped_mean(gradients: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Clipping, as a user-defined aggregation: the norm of the flat gradient is that of all gradients together."""
    mean = weighted_mean(gradients, counts)
    return mean * (0.1 / (mean.norm() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does


def batches(size: int, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(size)
    draw = lambda: torch.randn(size, 5, generator=generator, dtype=torch.float64).to(dtype)
    return [(draw(), torch.randint(0, 3, (size,), generator=generator)) for _ in range(STEPS)]


@dataclass(frozen=True)
class Case:
    kind: str = "central"  # central, last (the server is the last rank), sharded
    batch: int = 5
    optimizer: Any = sgd
    aggregate: Any = None
    dtype: torch.dtype = torch.float64

    def make(self, module: nn.Module, comm: Any) -> Any:
        if self.kind == "sharded":
            return ShardedParameterServer(module, comm, self.optimizer, self.aggregate)
        server = comm.world_size - 1 if self.kind == "last" else 0
        return ParameterServer(module, comm, self.optimizer, self.aggregate, server)


KINDS = ["central", "last", "sharded"]
CASES = [
    *(Case(kind, batch) for kind in KINDS for batch in (5, 2, 57)),
    *(Case(kind, optimizer=adamw) for kind in KINDS),
    *(Case(kind, dtype=torch.float32) for kind in KINDS),
    Case(aggregate=clipped_mean),
]


@dataclass
class Outcome:
    losses: list[float]
    state: dict[str, torch.Tensor]
    start: tuple[int, int]
    step: tuple[int, int, int]  # bytes sent and received, messages
    state_elements: int  # of the optimizer


def run_all(comm: Any, cases: list[Case]) -> list[Outcome]:
    return [run_one(comm, case) for case in cases]


def run_one(comm: Any, case: Case) -> Outcome:
    comm.ledger.clear()
    module = model(seed=comm.rank, dtype=case.dtype)  # another one on every rank: the server's must win
    server = case.make(module, comm)
    start = comm.ledger.bytes_sent, comm.ledger.bytes_received
    losses = []
    for inputs, targets in batches(case.batch, case.dtype):
        comm.ledger.clear()
        losses.append(server.step(inputs, targets, nn.functional.cross_entropy))
    step = comm.ledger.bytes_sent, comm.ledger.bytes_received, comm.ledger.messages
    assert all(row.exact and row.op in ("send", "recv", "exchange") for row in comm.ledger)
    states = server.optimizer.state.values() if server.optimizer else []
    held = sum(state["momentum_buffer"].numel() for state in states if "momentum_buffer" in state)
    return Outcome(losses, module.state_dict(), start, step, held)


@functools.cache
def world(world_size: int) -> list[list[Outcome]]:
    """For each case, the outcome of each rank."""
    of_rank = launch(run_all, CASES, world_size=world_size, backend="gloo", show="none")
    return [list(outcomes) for outcomes in zip(*of_rank, strict=True)]


@functools.cache
def one_process(case: Case, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The truth: the whole batch, torch alone."""
    module = model(seed, case.dtype)
    optimizer = case.optimizer([p for p in module.parameters() if p.requires_grad])
    losses = []
    for inputs, targets in batches(case.batch, case.dtype):
        loss = nn.functional.cross_entropy(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if case.aggregate is clipped_mean:
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def each_case() -> Any:
    return pytest.mark.parametrize(
        "world_size, number",
        [
            pytest.param(n, i, id=f"{n}-{c.kind}-{c.batch}-{c.optimizer.__name__}-{i}")
            for n in WORLDS
            for i, c in enumerate(CASES)
        ],
    )


@each_case()
def test_equals_one_process_on_the_whole_batch(world_size: int, number: int):
    """Not bit for bit: one process adds over all samples at once, N ranks over slices and then over ranks."""
    case = CASES[number]
    root = world_size - 1 if case.kind == "last" else 0
    losses, state = one_process(case, root)
    tolerance = 1e-12 if case.dtype == torch.float64 else 1e-5
    if case.optimizer is adamw:
        tolerance *= 1e3  # its first steps divide a gradient by its own size: a rounding of a tiny one shows
    for outcome in world(world_size)[number]:
        assert outcome.losses == pytest.approx(losses, rel=tolerance)
        assert outcome.losses == world(world_size)[number][0].losses
        for name, right in state.items():
            torch.testing.assert_close(outcome.state[name], right, rtol=tolerance, atol=tolerance)
            assert torch.equal(outcome.state[name], world(world_size)[number][0].state[name]), name
        assert torch.equal(outcome.state["unused"], torch.ones(3, 2, dtype=case.dtype)), "weight decay"


@pytest.mark.parametrize("number", [i for i, case in enumerate(CASES) if case.aggregate is None])
def test_a_world_of_one_is_one_process_bit_for_bit(number: int):
    losses, state = one_process(CASES[number], 0)
    (outcome,) = world(1)[number]
    assert outcome.losses == losses
    assert all(torch.equal(outcome.state[name], right) for name, right in state.items())


@pytest.mark.parametrize("world_size", WORLDS)
def test_equals_the_same_slices_in_one_process_bit_for_bit(world_size: int):
    """With the order of the sums fixed, nothing is left to tolerate; sharding changes no bit either."""
    case = Case(dtype=torch.float32)
    module = model(0, case.dtype)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = sgd(parameters)
    for inputs, targets in batches(case.batch, case.dtype):
        slices = [(a, b) for a, b in chunk_bounds(len(inputs), world_size) if b > a]
        flats = []
        for start, stop in slices:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs[start:stop]), targets[start:stop]).backward()
            flats.append([None if p.grad is None else p.grad.clone() for p in parameters])
        counts = [stop - start for start, stop in slices]
        for p, *grads in zip(parameters, *flats, strict=True):
            p.grad = None if grads[0] is None else weighted_mean(grads, counts)
        optimizer.step()
    for number, case in enumerate(CASES):
        if case.dtype == torch.float32 and case.kind != "last":
            state = world(world_size)[number][0].state
            assert all(torch.equal(state[name], right) for name, right in module.state_dict().items())


@each_case()
def test_the_ledger_equals_the_formula(world_size: int, number: int):
    case, outcomes = CASES[number], world(world_size)[number]
    module = model(0, case.dtype)
    trainable = [p for p in module.parameters() if p.requires_grad]
    sizes = (world_size, sum(p.numel() for p in trainable), case.dtype.itemsize, len(trainable))
    root = world_size - 1 if case.kind == "last" else 0
    if case.kind == "sharded":
        counts, messages = (
            server_traffic.sharded_step_bytes(*sizes),
            server_traffic.sharded_step_messages(world_size),
        )
    else:
        counts = server_traffic.server_step_bytes(*sizes, server=root)
        messages = server_traffic.server_step_messages(world_size, root)
    assert [outcome.step for outcome in outcomes] == [(*c, m) for c, m in zip(counts, messages, strict=True)]
    everything = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    assert [outcome.start for outcome in outcomes] == server_traffic.start_bytes(world_size, everything, root)


def test_same_total_other_balance():
    """(N-1)·S through one link, or 2(N-1)/N·S through each: the totals are the same but for headers."""
    central = server_traffic.server_step_bytes(4, 1_000_000)
    sharded = server_traffic.sharded_step_bytes(4, 1_000_000)
    assert central[0].sent == pytest.approx(3 * 4e6, rel=1e-4)
    assert central[0].received == pytest.approx(3 * 4e6, rel=1e-4)
    assert [one.sent for one in sharded] == pytest.approx([1.5 * 4e6] * 4, rel=1e-4)
    assert sum(one.sent for one in sharded) == pytest.approx(sum(one.sent for one in central), rel=1e-4)
    with pytest.raises(ValueError, match="server: expected a rank"):
        server_traffic.server_step_bytes(2, 10, server=2)


@pytest.mark.parametrize("world_size", WORLDS)
def test_only_servers_keep_optimizer_state(world_size: int):
    by_case = dict(zip(CASES, world(world_size), strict=True))
    used = sum(p.numel() for n, p in model(0).named_parameters() if p.requires_grad and n != "unused")
    central = [outcome.state_elements for outcome in by_case[Case()]]
    assert central == [used] + [0] * (world_size - 1)
    sharded = [outcome.state_elements for outcome in by_case[Case("sharded")]]
    assert sum(sharded) == used and max(sharded) <= -(-(used + 6) // world_size)


# --- the sharded server is made of two collectives


def shard_and_collect(comm: Any, length: int) -> tuple[Any, ...]:
    gradient = torch.arange(length, dtype=torch.float64) * 7 + 1000 * comm.rank
    start, stop = chunk_bounds(length, comm.world_size)[comm.rank]
    pushed = torch.stack(push_chunks(comm, gradient)).sum(dim=0)
    scattered = torch.empty(stop - start, dtype=torch.float64)
    collectives.ring_reduce_scatter(comm, scattered, gradient)
    pulled, gathered = torch.zeros(2, length, dtype=torch.float64)
    pulled[start:stop] = scattered
    pull_chunks(comm, pulled)
    collectives.ring_all_gather(comm, gathered, scattered)
    parameters, reduced = torch.ones(length, dtype=torch.float64), gradient.clone()
    sharded_step(comm, parameters, gradient, learning_rate=0.5)
    collectives.ring_all_reduce(comm, reduced)
    return pushed, scattered, pulled, gathered, parameters, 1 - 0.5 * reduced


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("length", [57, 3, 0])
def test_push_is_a_reduce_scatter_and_pull_an_all_gather(world_size: int, length: int):
    for values in launch(shard_and_collect, length, world_size=world_size, backend="gloo", show="none"):
        for ours, theirs in zip(values[::2], values[1::2], strict=True):
            assert torch.equal(ours, theirs)  # whole numbers: no order of sums matters


# --- weights


def tokens(comm: Any, losses_of: list[list[float]], aggregate: Any) -> tuple[float, float]:
    """Each rank has tokens of the given losses; loss = mean of weight · losses. Returns (mean loss, gradient)."""
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(module.weight)
    server = ParameterServer(module, comm, lambda p: torch.optim.SGD(p, lr=1.0), aggregate)
    mine = torch.tensor(losses_of[comm.rank], dtype=torch.float64)
    loss = (module.weight * mine).mean()  # no token: 0/0, and its gradient is NaN
    loss.backward()
    server.push(len(mine), loss)
    mean = server.pull()
    return mean, 1 - module.weight.item()


def plain_mean(gradients: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    return torch.stack(gradients).mean(dim=0)


@pytest.mark.parametrize(
    "losses_of, aggregate, loss, gradient",
    [
        ([[4], [1, 1, 1]], None, 1.75, 1.75),
        ([[4], [], [1, 1, 1]], None, 1.75, 1.75),
        ([[], [2, 4]], None, 3, 3),
        ([[0.3, 0.2, 0.8]], plain_mean, 1.3 / 3, 1.3 / 3),
        ([[0.3, 0.2], [0.8]], plain_mean, 1.3 / 3, 0.525),
        ([[0.3], [0.2], [0.8]], plain_mean, 1.3 / 3, 1.3 / 3),
        ([[0.3, 0.2], [0.8]], None, 1.3 / 3, 1.3 / 3),
        ([[], []], None, math.nan, 0),  # nobody had a sample: nothing changes
    ],
)
def test_a_sample_weighs_the_same_wherever_it_is(losses_of, aggregate, loss, gradient):
    results = launch(tokens, losses_of, aggregate, world_size=len(losses_of), backend="gloo", show="none")
    for got in results:
        assert got == pytest.approx((loss, gradient), nan_ok=True)


# --- asynchronous


def worker_batches(worker: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + worker)
    draw = lambda: torch.randn(worker + 1, 5, generator=generator, dtype=torch.float64)
    return [(draw(), torch.randint(0, 3, (worker + 1,), generator=generator)) for _ in range(count)]


def run_async(comm: Any, bound: int | None, count: int, server: int = 0) -> tuple[Any, Any, Any]:
    module = model(seed=comm.rank)
    serving = AsyncParameterServer(module, comm, sgd, bound=bound, server=server)
    comm.ledger.clear()
    report = serving.run(worker_batches(comm.rank, count), nn.functional.cross_entropy)
    return report, module.state_dict(), (comm.ledger.bytes_sent, comm.ledger.bytes_received)


@functools.cache
def async_run(bound: int | None, world_size: int = 4, count: int = 8) -> Any:
    return launch(run_async, bound, count, world_size=world_size, backend="gloo", show="none")


BOUNDS = [0, 1, 2, 3, 5, None]


@pytest.mark.parametrize("bound", BOUNDS)
def test_no_update_is_staler_than_the_bound(bound: int | None):
    report: AsyncReport = async_run(bound)[0][0]
    assert min(report.staleness) >= 0 and report.staleness[0] == 0
    assert max(report.staleness) <= (len(report.updates) if bound is None else bound)
    assert report.at_once <= (3 if bound is None else min(3, bound + 1))
    assert report.lost == {}
    for before, after in itertools.pairwise(report.updates):
        assert after.time_s >= before.time_s and after.samples - before.samples == after.worker + 1
    assert report.updates_per_s > 0


@pytest.mark.parametrize("bound", BOUNDS)
def test_every_worker_pushes_all_it_has(bound: int | None):
    workers = [update.worker for update in async_run(bound)[0][0].updates]
    assert {worker: workers.count(worker) for worker in workers} == {1: 8, 2: 8, 3: 8}


@pytest.mark.parametrize("bound", [0, None])
def test_its_bytes(bound: int | None):
    trainable = [p for p in model(0).parameters() if p.requires_grad]
    right = server_traffic.async_worker_bytes(8, 8, sum(p.numel() for p in trainable), 8, len(trainable))
    (sent, received), *workers = [counts for _, _, counts in async_run(bound)]
    assert workers == [right] * 3
    assert (sent, received) == (3 * right.received, 3 * right.sent)


def replayed(report: AsyncReport, count: int, seed: int) -> dict[str, torch.Tensor]:
    """One process that takes the batches in the order in which the server applied their gradients."""
    module = model(seed)
    optimizer = sgd([p for p in module.parameters() if p.requires_grad])
    streams = {worker: iter(worker_batches(worker, count)) for worker in range(8)}
    for update in report.updates:
        inputs, targets = next(streams[update.worker])
        loss = nn.functional.cross_entropy(module(inputs), targets)
        assert loss.item() == update.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize("world_size, bound", [(4, 0), (2, None), (2, 3)])
def test_without_staleness_it_is_one_process_bit_for_bit(world_size: int, bound: int | None):
    """With bound 0, and with a single worker, whatever the bound."""
    report, state, _ = async_run(bound, world_size)[0]
    assert set(report.staleness) == {0}
    right = replayed(report, 8, seed=0)
    assert all(torch.equal(state[name], value) for name, value in right.items())


def test_any_rank_may_serve():
    results = launch(run_async, None, 3, 2, world_size=3, backend="gloo", show="none")
    assert results[0][0] is None and len(results[2][0].updates) == 6


def test_the_rule_is_as_loose_as_is_safe():
    """Every reachable state, by brute force: allowed exactly if no order of pushes can break the bound."""

    def worst(version: int, in_flight: list[int]) -> int:
        """The staleness of the stalest update, if each in flight pushes once more, in the worst order."""
        orders = itertools.permutations(in_flight)
        return max((version + at - pulled for order in orders for at, pulled in enumerate(order)), default=0)

    for count in range(4):
        for in_flight in itertools.product(range(4), repeat=count):
            for bound in range(6):
                allowed = may_pull(3, dict(enumerate(in_flight)), bound)
                assert allowed == (worst(3, [*in_flight, 3]) <= bound), (in_flight, bound)


def slow_worker(comm: Any, folder: str) -> Any:
    """Worker 1 holds its first gradient back until all others have left."""

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        while comm.rank == 1 and len(os.listdir(folder)) < comm.world_size - 2:
            time.sleep(0.005)
        return nn.functional.cross_entropy(outputs, targets)

    serving = AsyncParameterServer(model(0), comm, sgd)
    comm.barrier()
    if comm.rank > 1:  # begin when worker 1 has pulled
        comm.recv(torch.empty(1), 1)
    batches = worker_batches(comm.rank, 5)
    if comm.rank == 1:
        serving.pull()
        for rank in range(2, comm.world_size):
            comm.send(torch.empty(1), rank)
        loss_fn(serving.module(batches[0][0]), batches[0][1]).backward()
        serving.push(len(batches[0][0]), 0.5)
        return serving.leave()
    report = serving.run(batches, loss_fn)
    if comm.rank > 1:
        Path(folder, str(comm.rank)).touch()
    return report


def test_nobody_waits_for_a_slow_worker_and_its_staleness_shows(tmp_path: Path):
    report = launch(slow_worker, str(tmp_path), world_size=4, backend="gloo", show="none")[0]
    assert [update.worker for update in report.updates].index(1) == 10
    assert report.staleness[10] == 10


# --- ends, good and bad


def breaks(comm: Any) -> Any:
    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if comm.rank == 2 and len(steps) == 3:
            raise ValueError("the sensor is broken")
        steps.append(1)
        return nn.functional.cross_entropy(outputs, targets)

    steps: list[int] = []
    serving = AsyncParameterServer(model(0), comm, sgd, bound=1)
    return serving.run(worker_batches(comm.rank, 6), loss_fn)


def test_a_worker_whose_step_raises_leaves_and_the_rest_go_on():
    results = launch(breaks, world_size=4, backend="gloo", show="none")
    workers = [update.worker for update in results[0].updates]
    assert {worker: workers.count(worker) for worker in workers} == {1: 6, 2: 3, 3: 6}
    assert results[0].lost == {2: "ValueError: the sensor is broken"}
    assert "the sensor is broken" in results.output[2], "its traceback is shown"


KILLED = """
import os, signal, sys, torch
import torch.distributed as dist
from torch import nn
from course_lib.comm.communicator import Communicator
from course_lib.parallel.parameter_server import AsyncParameterServer, ParameterServer, PeerLost

def main(rank, dies):
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=4)
    def batches():
        for step in range(5):
            if (rank, step) == (dies, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            yield torch.ones(2, 3), torch.ones(2, 1)
    server = AsyncParameterServer(nn.Linear(3, 1), Communicator(), lambda p: torch.optim.SGD(p, lr=.1), bound=4)
    if rank == dies == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        report = server.run(batches(), nn.functional.mse_loss)
    except PeerLost as error:
        print(error, flush=True)
    else:
        if report:
            print(len(report.updates), report.lost, flush=True)

children = []
for rank in range(4):
    pid = os.fork()
    if pid == 0:
        try:
            main(rank, int(sys.argv[2]))
        finally:
            sys.stdout.flush()
            os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
"""


def run_with_a_death(tmp_path: Path, dies: int) -> list[str]:
    """Without a launcher, which would end the run: 4 processes, of which rank `dies` is killed."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(dies)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_worker_that_is_killed_is_noticed_and_the_rest_go_on(tmp_path: Path):
    (line,) = run_with_a_death(tmp_path, dies=2)
    assert line.startswith("13 {2: 'rank 0: the worker, rank 2, is gone (connection closed by peer)")


def test_workers_whose_server_is_killed_say_so(tmp_path: Path):
    lines = run_with_a_death(tmp_path, dies=0)
    assert len(lines) == 3
    assert all(f"rank {r}: the server, rank 0, is gone" in "\n".join(lines) for r in (1, 2, 3))


def server_dies(comm: Any, kind: str) -> None:
    make = {"sync": ParameterServer, "async": AsyncParameterServer}[kind]
    server = make(model(0), comm, sgd)
    if comm.rank == 0:
        os._exit(3)
    if kind == "sync":
        for inputs, targets in batches(5):
            server.step(inputs, targets, nn.functional.cross_entropy)
    else:
        server.run(worker_batches(comm.rank, 3), nn.functional.cross_entropy)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_in_a_launch_the_report_names_the_server_that_died(kind: str):
    with pytest.raises(RankError) as caught:
        launch(server_dies, kind, world_size=3, backend="gloo", show="none", timeout=20)
    assert caught.value.rank == 0 and caught.value.exitcode == 3


class Refuses(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ArithmeticError("a loss of NaN")


@pytest.mark.parametrize("bound", [None, 0])
def test_an_update_that_raises_ends_the_run_at_once(bound: int | None):
    def main(comm: Any) -> None:
        server = AsyncParameterServer(model(0), comm, lambda p: Refuses(p, lr=1.0), bound=bound)
        server.run(worker_batches(comm.rank, 3), nn.functional.cross_entropy)

    with pytest.raises(RankError, match="rank 0 of 3 raised ArithmeticError: a loss of NaN"):
        launch(main, world_size=3, backend="gloo", show="none", timeout=20)


# --- bad input


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def mixed() -> nn.Module:
    return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])


BAD = {
    "no module": (
        lambda c: ParameterServer("model", c, sgd),
        "rank R: module: expected an nn.Module, got str",
    ),
    "empty": (
        lambda c: ParameterServer(nn.Module(), c, sgd),
        "rank R: module: expected something to train, got 0 param",
    ),
    "frozen": (
        lambda c: ShardedParameterServer(frozen(), c, sgd),
        "got 2 parameters, none with elements and requires",
    ),
    "mixed": (
        lambda c: AsyncParameterServer(mixed(), c, sgd),
        "of one dtype, .* got torch.float32 and torch.float64",
    ),
    "server": (
        lambda c: ParameterServer(model(0), c, sgd, server=2),
        "rank R: server: expected a rank .* 0…1, got 2",
    ),
    "negative": (
        lambda c: AsyncParameterServer(model(0), c, sgd, server=-1),
        "rank R: server: expected .*, got -1",
    ),
    "made": (
        lambda c: ParameterServer(model(0), c, sgd(model(0).parameters())),
        "rank R: optimizer: expected a function .* got SGD; write lambda",
    ),
    "aggregate": (
        lambda c: ParameterServer(model(0), c, sgd, "mean"),
        "rank R: aggregate: expected a function",
    ),
    "bound": (
        lambda c: AsyncParameterServer(model(0), c, sgd, bound=-1),
        "rank R: bound: expected .*, or None, got -1",
    ),
    "fraction": (
        lambda c: AsyncParameterServer(model(0), c, sgd, bound=0.5),
        "rank R: bound: expected .* got 0.5",
    ),
    "count": (
        lambda c: ParameterServer(model(0), c, sgd).push(-1),
        r"rank R: push\(num_samples\): expected how many samples .* got -1",
    ),
    "a loss for a count": (
        lambda c: ParameterServer(model(0), c, sgd).push(torch.tensor(0.5)),
        r"rank R: push\(num_samples\): expected how many samples",
    ),
    "early": (
        lambda c: AsyncParameterServer(model(0), c, sgd).push(1, 0.5),
        r"rank R: push\(\): expected a pull\(\) before each push",
    ),
}


def all_bad(comm: Any) -> dict[str, str]:
    said = {}
    for name, (call, _) in BAD.items():
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            call(comm)
        said[name] = str(caught.value)
    return said


@functools.cache
def what_bad_input_said() -> Any:
    return launch(all_bad, world_size=2, backend="gloo", show="none")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_on_every_rank(name: str):
    for rank, said in enumerate(what_bad_input_said()):
        assert re.search(BAD[name][1].replace("rank R", f"rank {rank}"), said[name]), said[name]


def test_an_asynchronous_run_needs_a_worker():
    with pytest.raises(RankError, match=r"at least 2 ranks, .* world_size=2 or more, or use ParameterServer"):
        launch(run_async, None, 1, world_size=1, backend="gloo", show="none")


def other_models(comm: Any) -> None:
    ParameterServer(nn.Linear(3 + comm.rank, 2), comm, sgd)


def test_another_model_on_a_rank_is_said():
    said = "rank 1: module: expected rank 0's model, 2 tensors with 8 elements, .* got 2 tensors with 10 elements"
    with pytest.raises(RankError, match=said) as caught:
        launch(other_models, world_size=2, backend="gloo", show="none")
    assert caught.value.rank == 1


def other_shapes(comm: Any) -> None:
    ParameterServer(nn.Linear(2 + 2 * comm.rank, 4 - 2 * comm.rank, bias=False), comm, sgd)


def test_as_many_numbers_in_other_shapes_are_another_model():
    with pytest.raises(
        RankError, match=r"rank 1: module: expected rank 0's model, .* layout .* Build the same module"
    ):
        launch(other_shapes, world_size=2, backend="gloo", show="none")


def misuses(comm: Any) -> list[str]:
    server = AsyncParameterServer(model(0), comm, sgd, bound=0)
    if server.is_server:
        return [str(update.samples) for update in server.serve().updates]
    said = []
    server.pull()
    with pytest.raises(RuntimeError) as caught:
        server.pull()
    said.append(str(caught.value))
    for wrong in (-5, 0, 2.5):
        with pytest.raises(ValueError) as refused:
            server.push(wrong, 1.0)
        said.append(str(refused.value))
    server.push(5, 1.0)
    server.leave()
    return said


def test_an_asynchronous_worker_that_pulls_twice_or_counts_wrong():
    served, (twice, *counts) = launch(misuses, world_size=2, backend="gloo", show="none")
    assert served == ["5"]  # what was refused moved nothing
    assert "rank 1: pull(): expected a push() after each pull()" in twice
    for text, wrong in zip(counts, ("-5", "0", "2.5"), strict=True):
        assert "rank 1: push(num_samples): expected how many samples" in text and f"got {wrong};" in text


def wrong_aggregate(comm: Any, aggregate: Any, kind: Any) -> None:
    server = kind(model(0), comm, sgd, aggregate)
    server.step(*batches(5)[0], nn.functional.cross_entropy)


@pytest.mark.parametrize("kind", [ParameterServer, ShardedParameterServer])
@pytest.mark.parametrize(
    "aggregate, got",
    [
        (lambda gradients, counts: gradients[0][:2], r"got shape \(2,\), torch.float64"),
        (lambda gradients, counts: gradients[0].float(), "torch.float32"),
        (lambda gradients, counts: None, "got None"),
        (lambda gradients, counts: gradients, "got "),
    ],
)
def test_an_aggregate_of_the_wrong_kind_is_said(aggregate, got, kind):
    with pytest.raises(RankError, match=f"aggregate: expected it to return one flat gradient .*{got}"):
        launch(wrong_aggregate, aggregate, kind, world_size=2, backend="gloo", show="none")


def no_optimizer(comm: Any) -> None:
    ParameterServer(model(0), comm, lambda parameters: parameters)


def test_an_optimizer_function_that_makes_none_is_said():
    with pytest.raises(RankError, match=r"optimizer: expected a function .*, which returned list"):
        launch(no_optimizer, world_size=1, backend="gloo", show="none")


def test_weights_do_not_change_what_they_weigh():
    gradients, counts = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])], [3, 1]
    assert weighted_mean(gradients, counts).tolist() == [2.0, 3.0]
    assert gradients[0].tolist() == [1.0, 2.0] and counts == [3, 1]


@pytest.mark.parametrize("kind", [ParameterServer, ShardedParameterServer])
def test_steps_are_timed(kind: Any):
    results = launch(measure_steps, 4000, 2, kind, world_size=3, backend="gloo", show="none")
    assert len(results[0]) == 2 and min(results[0]) > 0 and all(r == results[0] for r in results)
