"""All-reduce on limited links: naive, tree, ring and the backend's own, each beside its formula.

`measure(num_hosts)` times them on virtual hosts, one rank each; chapter 02 draws what it returns. The bench holds
the ring against gloo's all_reduce. Every measurement begins with a calibration: a link that does not carry what it says
stops it (`LinkNotAsSet`). Where messages are only paced in software, torch's own collective is not limited, and so it
is left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from course_lib import VirtualHosts, launch
from course_lib.bench.rows import BenchRow, row
from course_lib.comm.collectives import naive_all_reduce, ring_all_reduce, tree_all_reduce
from course_lib.comm.communicator import Communicator
from course_lib.plan import costs

SIZE_BYTES = 8_000_000
LINK = "400Mbit"
RUNS = 3

ALGORITHMS: dict[str, Callable[[Communicator, torch.Tensor], object]] = {
    "naive": naive_all_reduce,
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "gloo": lambda comm, tensor: dist.all_reduce(tensor),
}
_FORMULAS = {
    "naive": costs.naive_all_reduce_time_s,
    "tree": costs.tree_all_reduce_time_s,
    "ring": costs.ring_all_reduce_time_s,
}


@dataclass(frozen=True)
class OnLinks:
    """One algorithm on `num_hosts` hosts. `predicted_s` is None for the backend's own, whose algorithm is its secret.

    `ledger_bytes` and `link_bytes`: what host 0 sent in one run, by its ledger (None for the backend's own) and by the
    counters of its link (None if paced in software; headers included).
    """

    algorithm: str
    num_hosts: int
    size_bytes: int
    predicted_s: float | None
    measured_s: float
    ledger_bytes: int | None
    link_bytes: float | None
    how: str
    equal: bool


def measure(
    num_hosts: int, size_bytes: int = SIZE_BYTES, link: str = LINK, how: str = "auto", runs: int = RUNS
) -> list[OnLinks]:
    """The median seconds of `runs` runs of each algorithm, for `size_bytes` of float32, one rank on each host."""
    with VirtualHosts(num_hosts, link=link, how=how) as hosts:
        hosts.calibrate()
        names = [name for name in ALGORITHMS if name != "gloo" or hosts.how == "namespaces"]
        _, idle_bytes = _run(hosts, "", 4, runs)  # what starting and meeting put on the link
        return [_one(hosts, name, size_bytes, runs, idle_bytes) for name in names]


def _one(hosts: VirtualHosts, name: str, size_bytes: int, runs: int, idle_bytes: float) -> OnLinks:
    (seconds, sent, equal), link_bytes = _run(hosts, name, size_bytes, runs)
    formula = _FORMULAS.get(name)
    return OnLinks(
        algorithm=name,
        num_hosts=hosts.num_hosts,
        size_bytes=size_bytes,
        predicted_s=formula(hosts.num_hosts, size_bytes, 0.0, hosts.bytes_per_s) if formula else None,
        measured_s=seconds,
        ledger_bytes=sent if formula else None,
        link_bytes=link_bytes - idle_bytes if hosts.how == "namespaces" else None,
        how=hosts.how,
        equal=equal,
    )


def _run(hosts: VirtualHosts, name: str, size_bytes: int, runs: int) -> tuple[tuple[float, int, bool], float]:
    """Rank 0's (median seconds, bytes sent in a run, right), and the bytes on host 0's link for each run."""
    counted = hosts.how == "namespaces"
    before = hosts.counters()[0].bytes_sent if counted else 0
    results = launch(
        _on_rank, name, size_bytes, runs, world_size=hosts.num_hosts, hosts=hosts, show="none", backend="gloo"
    )
    after = hosts.counters()[0].bytes_sent if counted else 0
    return results[0], (after - before) / runs


def _on_rank(comm: Communicator, name: str, size_bytes: int, runs: int) -> tuple[float, int, bool]:
    whole = (torch.arange(size_bytes // 4) % 1000).float()
    expected = whole * comm.world_size + sum(range(comm.world_size))  # whole numbers: exact in any order
    times, right = [], True
    if name:
        ALGORITHMS[name](comm, torch.zeros(64))  # its ranks meet for the first time
    for _ in range(runs):
        tensor = whole + comm.rank
        comm.barrier()
        comm.ledger.clear()
        began = time.perf_counter()
        if name:
            ALGORITHMS[name](comm, tensor)
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        sent = comm.ledger.bytes_sent
        comm.all_reduce(seconds, "max")
        times.append(seconds.item())
        right = right and torch.equal(tensor, expected)
    return statistics.median(times), sent, right


def rows(world_sizes: Sequence[int]) -> list[BenchRow]:
    """For each world size of 2 or more: the ring against gloo's own all_reduce, one rank on each host."""
    found = []
    for world_size in world_sizes:
        if world_size < 2:
            continue
        measured = {one.algorithm: one for one in measure(world_size, how="namespaces")}
        ring, gloo = measured["ring"], measured["gloo"]
        found.append(
            row(
                "links",
                f"all_reduce {SIZE_BYTES / 1e6:g} MB at {LINK}",
                world_size,
                ("ring_all_reduce", ring.measured_s),
                ("all_reduce (gloo)", gloo.measured_s),
                ring.equal and gloo.equal,
                all=[asdict(one) for one in measured.values()],
            )
        )
    return found
