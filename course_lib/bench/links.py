"""All-reduce on limited links: naive, tree, ring and the backend's own, each beside its formula.

`measure(num_hosts)` times them on virtual hosts, one rank each; chapter 02 draws what it returns. The bench holds the
ring against gloo's all_reduce. Every measurement begins with a calibration: a link that does not carry what it says
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

    `ledger_bytes` and `link_bytes`: what host 0 sent in one run, by its ledger (0 for the backend's own) and by the
    counters of its link (None if paced in software; headers included).
    """

    algorithm: str
    num_hosts: int
    size_bytes: int
    predicted_s: float | None
    measured_s: float
    ledger_bytes: int
    link_bytes: float | None
    how: str
    equal: bool


def measure(
    num_hosts: int, size_bytes: int = SIZE_BYTES, link: str = LINK, how: str = "auto"
) -> list[OnLinks]:
    """Median seconds of three runs of each algorithm, taken alternately, for `size_bytes` of float32."""
    with VirtualHosts(num_hosts, link=link, how=how) as hosts:
        hosts.calibrate()
        names = [name for name in ALGORITHMS if name != "gloo" or hosts.how == "namespaces"]
        results = launch(
            _on_ranks, names, size_bytes, world_size=num_hosts, hosts=hosts, show="none", backend="gloo"
        )
        link_bytes = _on_the_wire(hosts, names, size_bytes) if hosts.how == "namespaces" else {}
    found = []
    for name in names:
        seconds, sent, equal = results[0][name]
        formula = _FORMULAS.get(name)
        predicted = formula(num_hosts, size_bytes, 0.0, hosts.bytes_per_s) if formula else None
        on_link = link_bytes.get(name)
        found.append(
            OnLinks(name, num_hosts, size_bytes, predicted, seconds, sent, on_link, hosts.how, equal)
        )
    return found


def _on_ranks(
    comm: Communicator, names: Sequence[str], size_bytes: int
) -> dict[str, tuple[float, int, bool]]:
    whole = (torch.arange(size_bytes // 4) % 1000).float()
    times: dict[str, list[float]] = {name: [] for name in names}
    sent, equal = {}, {}
    for _ in range(RUNS):
        for name in names:
            tensor = whole + comm.rank
            comm.barrier()
            comm.ledger.clear()
            began = time.perf_counter()
            ALGORITHMS[name](comm, tensor)
            seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            sent[name] = comm.ledger.bytes_sent
            comm.all_reduce(seconds, "max")
            times[name].append(seconds.item())
            # Whole numbers: their sum is the same in any order.
            expected = whole * comm.world_size + sum(range(comm.world_size))
            equal[name] = torch.equal(tensor, expected)
    return {name: (statistics.median(times[name]), sent[name], equal[name]) for name in names}


def _on_the_wire(hosts: VirtualHosts, names: Sequence[str], size_bytes: int) -> dict[str, float]:
    """What each algorithm puts on host 0's link: a launch with it, less a launch without it."""
    counted = {}
    for name in ("", *names):
        before = hosts.counters()[0].bytes_sent
        launch(_once, name, size_bytes, world_size=hosts.num_hosts, hosts=hosts, show="none", backend="gloo")
        counted[name] = hosts.counters()[0].bytes_sent - before
    return {name: counted[name] - counted[""] for name in names}


def _once(comm: Communicator, name: str, size_bytes: int) -> None:
    if name:
        ALGORITHMS[name](comm, torch.zeros(size_bytes // 4))


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
