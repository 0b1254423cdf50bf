"""Every collective, on 1 to 4 real ranks: right values, the same bits everywhere, and exactly the bytes on paper.

One launch for each world runs all cases; the tests then look at what came out. A case that only had right values would
bless a ring that passes whole tensors, so bytes and messages are held against `plan.traffic` in every case, and a few
wrong rings show that this catches them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib import RanksHung, launch
from course_lib.comm import collectives
from course_lib.comm.collectives import AVG, MAX, MIN, PRODUCT, SUM
from course_lib.plan import traffic
from course_lib.plan.partition import chunk_bounds

WORLDS = [1, 2, 3, 4]
LENGTHS = [0, 1, 2, 3, 4, 5, 57, 1857]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32]
SMALL_SEGMENTS = 64  # bytes, so that short tensors are cut into several segments too


@dataclass(frozen=True)
class Case:
    algorithm: str  # naive, tree, ring, hierarchical; reduce_scatter, all_gather; reduce, broadcast
    length: int = 57
    dtype: torch.dtype = torch.float32
    op: str = SUM
    shape: str = "flat"  # flat, transposed, strided, scalar
    segment_bytes: int = traffic.SEGMENT_BYTES
    root: int = 0


@dataclass
class Outcome:
    """What one rank had at the end of a case."""

    value: torch.Tensor
    sent: int
    received: int
    messages: int
    exact: bool
    untouched: bool  # what had to stay as it was: the input of a reduce_scatter, the gaps of a strided view


ALL_REDUCES = ["naive", "tree", "ring", "hierarchical"]
ALGORITHMS = [*ALL_REDUCES, "reduce_scatter", "all_gather", "reduce", "broadcast"]
CASES = [
    *(Case(a, length) for a in [*ALL_REDUCES, "reduce_scatter", "all_gather"] for length in LENGTHS),
    *(
        Case(a, 57, dtype, op)
        for a in [*ALL_REDUCES, "reduce_scatter"]
        for dtype in DTYPES
        for op in (SUM, MAX, MIN)
    ),
    *(Case(a, 57, dtype, AVG) for a in [*ALL_REDUCES, "reduce_scatter"] for dtype in FLOATS),
    *(Case(a, 5, torch.float64, PRODUCT) for a in [*ALL_REDUCES, "reduce_scatter"]),
    *(Case(a, 60, shape=shape) for a in [*ALL_REDUCES, "all_gather"] for shape in ("transposed", "strided")),
    *(Case(a, 57, shape="strided") for a in ("reduce_scatter", "all_gather", "reduce", "broadcast")),
    *(Case(a, 1, shape="scalar") for a in [*ALL_REDUCES, "broadcast"]),
    *(
        Case(a, length, op=AVG, segment_bytes=SMALL_SEGMENTS)
        for a in ("ring", "hierarchical", "reduce_scatter")
        for length in (57, 1857, 2000)
    ),
    *(Case("all_gather", 57, dtype) for dtype in DTYPES),
    *(Case(a, 57, dtype, root=1) for a in ("reduce", "broadcast") for dtype in (torch.float32, torch.int64)),
    *(Case("reduce", 57, op=op, root=root) for op in (AVG, MAX) for root in (0, 2, 3)),
    *(Case("broadcast", length, root=3) for length in LENGTHS),
]


def values(rank: int, case: Case) -> torch.Tensor:
    """A different value in every element and on every rank; small, so that no dtype overflows."""
    i = torch.arange(case.length, dtype=torch.float64)
    exact = ((i * 7 + rank * 3) % 61 - 30) + (rank + 1) / 8
    return exact.trunc().to(case.dtype) if not case.dtype.is_floating_point else exact.to(case.dtype)


def shaped(flat: torch.Tensor, shape: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in a tensor of that shape, and all the memory it lies in."""
    if shape == "flat":
        return flat, flat
    if shape == "scalar":
        return flat.reshape(()), flat
    if shape == "transposed":
        memory = flat.reshape(5, -1).T.contiguous()
        return memory.T, memory
    memory = torch.full((len(flat), 3), -7, dtype=flat.dtype)
    memory[:, 1] = flat
    return memory[:, 1], memory


def run_case(comm, case: Case, case_root: int, per_host: int) -> Outcome:
    start, stop = chunk_bounds(case.length, comm.world_size)[comm.rank]
    flat = values(comm.rank, case)
    tensor, memory = shaped(flat.clone(), case.shape)
    segments = {"segment_bytes": case.segment_bytes}
    untouched = True
    comm.ledger.clear()
    match case.algorithm:
        case "reduce":
            collectives.reduce(comm, tensor, case_root, case.op)
        case "broadcast":
            collectives.broadcast(comm, tensor, case_root)
        case "reduce_scatter":
            out, memory = shaped(torch.zeros(stop - start, dtype=case.dtype), case.shape)
            collectives.ring_reduce_scatter(comm, out, tensor, case.op, **segments)
            untouched, tensor = torch.equal(tensor, flat), out
        case "all_gather":
            out, memory = shaped(torch.zeros(case.length, dtype=case.dtype), case.shape)
            collectives.ring_all_gather(comm, out, tensor.reshape(-1)[start:stop])
            tensor = out
        case "hierarchical":
            options = {"ranks_per_host": per_host, **segments}
            collectives.hierarchical_all_reduce(comm, tensor, case.op, **options)
        case "ring":
            collectives.ring_all_reduce(comm, tensor, case.op, **segments)
        case _:
            getattr(collectives, f"{case.algorithm}_all_reduce")(comm, tensor, case.op)
    if case.shape == "strided":
        untouched = untouched and bool((memory[:, ::2] == -7).all())
    ledger = comm.ledger
    exact = all(row.exact for row in ledger)
    counts = (ledger.bytes_sent, ledger.bytes_received, ledger.messages)
    return Outcome(tensor.reshape(-1).clone(), *counts, exact, untouched)


def run_all(comm, cases: list[Case]) -> list[Outcome]:
    per_host = ranks_per_host(comm.world_size)
    return [run_case(comm, case, case.root % comm.world_size, per_host) for case in cases]


def ranks_per_host(world_size: int) -> int:
    return 2 if world_size % 2 == 0 else 1


@functools.cache
def outcomes(world_size: int) -> dict[Case, list[Outcome]]:
    """For each case, the outcome of every rank."""
    results = launch(run_all, CASES, world_size=world_size, show="none")
    return dict(zip(CASES, zip(*results, strict=True), strict=True))  # type: ignore[arg-type]


def expected(case: Case, world_size: int) -> torch.Tensor:
    """The result in one process and in float64 (int64), the whole of it."""
    inputs = torch.stack([values(rank, case).to(torch.float64) for rank in range(world_size)])
    if case.algorithm == "broadcast":
        return inputs[case.root % world_size]
    if case.algorithm == "all_gather":
        bounds = chunk_bounds(case.length, world_size)
        return torch.cat([inputs[rank, start:stop] for rank, (start, stop) in enumerate(bounds)])
    reductions = {SUM: inputs.sum(0), AVG: inputs.mean(0), PRODUCT: inputs.prod(0)}
    if case.length:
        reductions |= {MAX: inputs.amax(0), MIN: inputs.amin(0)}
    return reductions[case.op]


def of_algorithm(world_size: int, algorithm: str) -> list[tuple[Case, list[Outcome]]]:
    return [(case, ranks) for case, ranks in outcomes(world_size).items() if case.algorithm == algorithm]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values(algorithm: str, world_size: int) -> None:
    for case, ranks in of_algorithm(world_size, algorithm):
        right = expected(case, world_size)
        for rank, outcome in enumerate(ranks):
            mine = right
            if algorithm == "reduce_scatter":
                mine = right[slice(*chunk_bounds(case.length, world_size)[rank])]
            elif algorithm == "reduce" and rank != case.root % world_size:
                mine = values(rank, case).to(torch.float64)  # only the root's tensor changes
            # Sums of at most four values below 32, rounded to the dtype at most three times.
            tolerance = 3 * torch.finfo(case.dtype).eps if case.dtype.is_floating_point else 0
            close = torch.allclose(outcome.value.double(), mine, rtol=tolerance, atol=32 * tolerance)
            assert close, f"{case}, rank {rank}: {outcome.value} is not {mine}"
            assert outcome.value.dtype == case.dtype and outcome.untouched, f"{case}, rank {rank}"


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_ranks_end_with_the_same_bits(world_size: int) -> None:
    for case, ranks in outcomes(world_size).items():
        if case.algorithm not in ("reduce", "reduce_scatter"):
            bits = {rank.value.view(torch.uint8).numpy().tobytes() for rank in ranks}
            assert len(bits) == 1, case


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_and_messages_are_those_on_paper(algorithm: str, world_size: int) -> None:
    for case, ranks in of_algorithm(world_size, algorithm):
        bytes_of, messages_of = on_paper(case, world_size)
        assert [(rank.sent, rank.received) for rank in ranks] == bytes_of, case
        assert [rank.messages for rank in ranks] == messages_of, case
        assert all(rank.exact for rank in ranks), case


def on_paper(case: Case, world_size: int) -> tuple[list[traffic.Bytes], list[int]]:
    name = {"reduce_scatter": "ring_reduce_scatter", "all_gather": "ring_all_gather"}.get(
        case.algorithm,
        case.algorithm if case.algorithm in ("reduce", "broadcast") else f"{case.algorithm}_all_reduce",
    )
    sizes = (world_size, case.length, case.dtype.itemsize)
    options: dict[str, Any] = {}
    if case.algorithm in ("reduce", "broadcast"):
        options["root"] = case.root % world_size
    if case.algorithm == "hierarchical":
        options["ranks_per_host"] = ranks_per_host(world_size)
    segmented = case.algorithm in ("ring", "hierarchical", "reduce_scatter")
    cut = {"segment_bytes": case.segment_bytes} if segmented else {}
    bytes_of = getattr(traffic, f"{name}_bytes")(*sizes, **options)
    return bytes_of, getattr(traffic, f"{name}_messages")(*sizes, **options, **cut)


@pytest.mark.parametrize("length", [1, 2])
def test_a_ring_of_four_with_fewer_elements_than_ranks(length: int) -> None:
    """It ends, is right, and every rank sends its six messages, empty ones included."""
    for outcome in outcomes(4)[Case("ring", length)]:
        torch.testing.assert_close(outcome.value.double(), expected(Case("ring", length), 4))
        assert outcome.messages == 6 and outcome.sent <= 2 * length * 4


# --- against torch's own


def beside_torch(comm, dtype: torch.dtype) -> list[str]:
    """What differs between ours and torch's own, for lengths that torch's can take."""
    differences = []

    def compare(what: str, ours: torch.Tensor, torchs: torch.Tensor) -> None:
        tolerance = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0
        if not torch.allclose(ours.double(), torchs.double(), rtol=tolerance, atol=64 * tolerance):
            differences.append(f"{what}: {ours.tolist()} is not {torchs.tolist()}")

    tensor = values(comm.rank, Case("ring", 12 * comm.world_size, dtype))
    for op in (SUM, MAX, MIN, *([AVG] if dtype.is_floating_point else [])):
        ours, torchs = tensor.clone(), tensor.clone()
        collectives.ring_all_reduce(comm, ours, op)
        comm.all_reduce(torchs, op)
        compare(f"all_reduce {op}", ours, torchs)
        ours, torchs = torch.zeros(12, dtype=dtype), torch.zeros(12, dtype=dtype)
        collectives.ring_reduce_scatter(comm, ours, tensor, op)
        comm.reduce_scatter(torchs, tensor, op)
        compare(f"reduce_scatter {op}", ours, torchs)
    ours, torchs = torch.zeros_like(tensor), torch.zeros_like(tensor)
    collectives.ring_all_gather(comm, ours, tensor[:12])
    comm.all_gather(torchs, tensor[:12])
    compare("all_gather", ours, torchs)
    return differences


@pytest.mark.parametrize("world_size", WORLDS)
def test_as_torch_does_it(world_size: int) -> None:
    def work(comm):
        return {str(dtype): beside_torch(comm, dtype) for dtype in DTYPES}

    for differences in launch(work, world_size=world_size, show="none"):
        assert not any(differences.values()), differences


# --- wrong rings


def whole_tensor_ring(comm, tensor):
    """Right values, wrong bytes: the tensor itself goes round, (N-1)·S from each rank."""
    passing, coming, left = tensor.clone(), torch.empty_like(tensor), (comm.rank - 1) % comm.world_size
    for _ in range(comm.world_size - 1):
        comm.exchange(passing, (comm.rank + 1) % comm.world_size, coming, left)
        tensor += coming
        passing, coming = coming, passing


def ring_without_empty_messages(comm, tensor):
    """Right values and bytes, wrong messages: who has an empty chunk says nothing, and the neighbour knows."""
    N, r = comm.world_size, comm.rank
    chunks = [tensor[start:stop] for start, stop in chunk_bounds(len(tensor), N)]
    for step in range(2 * (N - 1)):
        send, came = chunks[(r - 1 - step) % N], chunks[(r - 2 - step) % N]
        part = torch.empty_like(came)
        if r % 2 and len(send):
            comm.send(send, (r + 1) % N)
        if len(came):
            comm.recv(part, (r - 1) % N)
            came.copy_(came + part if step < N - 1 else part)
        if r % 2 == 0 and len(send):
            comm.send(send, (r + 1) % N)


@pytest.mark.parametrize(
    ("ring", "length", "bytes_right", "messages_right"),
    [(whole_tensor_ring, 57, False, False), (ring_without_empty_messages, 2, True, False)],
)
def test_counts_catch_a_ring_with_right_values(
    ring, length: int, bytes_right: bool, messages_right: bool
) -> None:
    case = Case("ring", length)

    def work(comm):
        tensor = values(comm.rank, case)
        ring(comm, tensor)
        return tensor

    results = launch(work, world_size=4, show="none")
    for tensor in results:
        torch.testing.assert_close(tensor.double(), expected(case, 4))
    bytes_of, messages_of = on_paper(case, 4)
    assert ([(one.bytes_sent, one.bytes_received) for one in results.ledger] == bytes_of) is bytes_right
    assert ([one.messages for one in results.ledger] == messages_of) is messages_right


# --- how they take part in a launch


def test_hosts_come_from_the_communicator() -> None:
    def work(comm):
        comm.host_of = (0, 1, 0, 1)  # ranks 0 and 2 share a host
        tensor = torch.arange(8.0) + comm.rank
        collectives.hierarchical_all_reduce(comm, tensor)
        assert torch.equal(tensor, 4 * torch.arange(8.0) + 6)
        return [row.peer for row in comm.ledger]

    inside = {0: 2, 2: 0, 1: 3, 3: 1}
    across = {0: 1, 1: 0, 2: 3, 3: 2}
    for rank, peers in enumerate(launch(work, world_size=4, show="none")):
        assert peers == [inside[rank], across[rank], across[rank], inside[rank]]


def test_a_parameter_is_reduced_in_place_and_keeps_its_graph_out() -> None:
    def work(comm):
        parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3) + comm.rank)
        memory = parameter.data_ptr()
        collectives.ring_all_reduce(comm, parameter)
        collectives.broadcast(comm, parameter, 0)
        assert parameter.data_ptr() == memory and parameter.requires_grad and parameter.grad_fn is None
        return parameter.detach()

    for parameter in launch(work, world_size=2, show="none"):
        assert torch.equal(parameter, 2 * torch.arange(6.0).reshape(2, 3) + 1)


def test_in_place_gather_and_scatter_within_one_tensor() -> None:
    """A shard that is a view of the whole, as ZeRO keeps it."""

    def work(comm):
        whole = torch.arange(10.0) + comm.rank
        start, stop = chunk_bounds(10, comm.world_size)[comm.rank]
        collectives.ring_reduce_scatter(comm, whole[start:stop], whole)
        collectives.ring_all_gather(comm, whole, whole[start:stop])
        return whole

    for whole in launch(work, world_size=3, show="none"):
        assert torch.equal(whole, 3 * torch.arange(10.0) + 3)


def test_torch_s_own_names_for_reductions() -> None:
    def work(comm):
        tensor = torch.tensor([1.0 + comm.rank])
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, "SUM", "min"):
            collectives.ring_all_reduce(comm, tensor, op)
        return tensor.item()

    assert launch(work, world_size=2, show="none") == [6.0, 6.0]  # 1 + 2, doubled, and then left alone


def test_each_collective_is_one_event_of_the_trace() -> None:
    def work(comm):
        for name in ("naive", "tree", "ring", "hierarchical"):
            getattr(collectives, f"{name}_all_reduce")(comm, torch.ones(8))

    trace = launch(work, world_size=2, show="none").trace
    for rank in range(2):
        names = [event.name for event in trace.rank(rank) if event.lane == "collective"]
        assert names == [f"{name}_all_reduce" for name in ("naive", "tree", "ring", "hierarchical")]
        assert {event.lane for event in trace.rank(rank)} == {"collective", "comm"}


def test_a_mismatch_is_seen_before_bytes_move() -> None:
    def work(comm):
        collectives.ring_all_reduce(comm, torch.ones(12 + comm.rank))

    with pytest.raises(RanksHung) as hung:
        launch(work, world_size=2, show="none", timeout=2)
    assert "12 x float32 sum" in hung.value.sentence and "13 x float32 sum" in hung.value.sentence


def reduce_scatter_into_a_wrong_length(comm):
    collectives.ring_reduce_scatter(comm, torch.ones(5), torch.ones(9))


def gather_of_another_dtype(comm):
    collectives.ring_all_gather(comm, torch.ones(12), torch.ones(4, dtype=torch.int32))


def unequal_hosts(comm):
    comm.host_of = (0, 0, 1)
    collectives.hierarchical_all_reduce(comm, torch.ones(4))


BAD_CALLS = [
    (
        lambda comm: collectives.ring_all_reduce(comm, [1.0]),
        "TypeError",
        "expected a tensor, got list",
    ),
    (
        lambda comm: collectives.ring_all_reduce(comm, torch.ones(2), "mean"),
        "ValueError",
        "sum, avg, max",
    ),
    (
        lambda comm: collectives.tree_all_reduce(comm, torch.ones(2).int(), AVG),
        "ValueError",
        "torch.int32",
    ),
    (lambda comm: collectives.reduce(comm, torch.ones(2), 3), "ValueError", "reduce(root)"),
    (lambda comm: collectives.broadcast(comm, torch.ones(2), -1), "ValueError", "broadcast(root)"),
    (
        lambda comm: collectives.naive_all_reduce(comm, torch.ones(2, device="meta")),
        "ValueError",
        "on meta",
    ),
    (
        reduce_scatter_into_a_wrong_length,
        "ValueError",
        "this rank's chunk of 9 x float32 over 3 ranks",
    ),
    (gather_of_another_dtype, "ValueError", "got 4 x int32"),
    (unequal_hosts, "ValueError", "ring_all_reduce"),
    (
        lambda comm: collectives.hierarchical_all_reduce(comm, torch.ones(2), ranks_per_host=0),
        "ValueError",
        "ranks_per_host",
    ),
]


def test_bad_arguments_are_named() -> None:
    def work(comm):
        errors = []
        for call, _, _ in BAD_CALLS:
            try:
                call(comm)
            except (TypeError, ValueError) as error:
                errors.append((type(error).__name__, str(error)))
            else:
                errors.append(("nothing", "was raised"))
        return errors

    for errors in launch(work, world_size=3, show="none"):
        for (kind, message), (_, right_kind, words) in zip(errors, BAD_CALLS, strict=True):
            assert kind == right_kind and words in message, message
