"""The ring beside the backend's own collectives: 1, 16 and 64 MB of float32 on 2 and 4 ranks.

The size is that of the whole tensor; 1 MB = 10^6 bytes. Values are whole numbers, so their sum is the same in
any order and the two results must be equal bit for bit. "bytes_sent" is rank 0's, counted; "bus_bandwidth" is
bytes per second through each rank's link (`plan.costs.bus_bandwidth`).

Where ours is slower, and why. gloo's all_reduce is a ring, too, written in C++: its steps follow each other without a
word between the ranks, in segments small enough that adding hides completely behind receiving. Ours is driven by
messages, and gloo starts each message only after its receiver has said that it is ready. So small segments cost more
than they hide, and at 1 MB these handshakes are most of the time. From 16 MB on the two lie within 0.8 to 1.2 of each
other on two cores, and on limited links (`bench links`) within a few per cent. gloo's reduce_scatter and all_gather
move more bytes than a ring, and there ours wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from course_lib import launch
from course_lib.bench.rows import BenchRow, row, take_turns
from course_lib.comm.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from course_lib.comm.communicator import Communicator
from course_lib.comm.torch_collectives import torch_all_gather, torch_reduce_scatter
from course_lib.plan import costs

SIZES_MB = (1, 16, 64)
RUNS = {1: 41, 16: 15, 64: 9}


@dataclass
class Contestant:
    """One way to do it: `call` brings its result into `result`, which holds `before` when it starts."""

    name: str
    call: Callable[[], Any]
    result: torch.Tensor
    before: torch.Tensor

    def prepare(self) -> None:
        self.result.copy_(self.before)


def rows(world_sizes: Sequence[int], sizes_mb: Sequence[int] = SIZES_MB) -> list[BenchRow]:
    """For each world size, size and collective: ours beside the backend's."""
    found: list[BenchRow] = []
    for world_size in world_sizes:
        found += launch(on_ranks, sizes_mb, world_size=world_size, show="none")[0]
    return found


def on_ranks(comm: Communicator, sizes_mb: Sequence[int]) -> list[BenchRow]:
    contests = [(contest, mb) for mb in sizes_mb for contest in (all_reduce, reduce_scatter, all_gather)]
    return [measure(comm, mb, *contest(comm, whole_tensor(comm, mb))) for contest, mb in contests]


def whole_tensor(comm: Communicator, mb: int) -> torch.Tensor:
    """Different values on all ranks.

    As long as torch's own collectives take it, which is a multiple of world_size.
    """
    length = mb * 10**6 // 4 // comm.world_size * comm.world_size
    return (torch.arange(length, device=comm.device) % 1000 + comm.rank).float()


def all_reduce(comm: Communicator, whole: torch.Tensor) -> tuple[Contestant, Contestant]:
    a, b = whole.clone(), whole.clone()
    return (
        Contestant("ring_all_reduce", lambda: ring_all_reduce(comm, a), a, whole),
        Contestant("all_reduce", lambda: dist.all_reduce(b, group=comm.group), b, whole),
    )


def reduce_scatter(comm: Communicator, whole: torch.Tensor) -> tuple[Contestant, Contestant]:
    a, b, nothing = (torch.zeros_like(whole.chunk(comm.world_size)[0]) for _ in range(3))
    return (
        Contestant("ring_reduce_scatter", lambda: ring_reduce_scatter(comm, a, whole), a, nothing),
        Contestant("reduce_scatter", lambda: torch_reduce_scatter(b, whole, group=comm.group), b, nothing),
    )


def all_gather(comm: Communicator, whole: torch.Tensor) -> tuple[Contestant, Contestant]:
    mine = whole.chunk(comm.world_size)[comm.rank].clone()
    a, b, nothing = (torch.zeros_like(whole) for _ in range(3))
    return (
        Contestant("ring_all_gather", lambda: ring_all_gather(comm, a, mine), a, nothing),
        Contestant("all_gather", lambda: torch_all_gather(b, mine, group=comm.group), b, nothing),
    )


def measure(comm: Communicator, mb: int, ours: Contestant, peer: Contestant) -> BenchRow:
    ours_s, peer_s = take_turns(comm, [ours, peer], RUNS.get(mb, 9))
    equal = torch.tensor([int(torch.equal(ours.result, peer.result))], device=comm.device)
    comm.all_reduce(equal, "min")  # on all ranks, or not at all
    comm.ledger.clear()
    ours.prepare()
    ours.call()
    return row(
        "ring",
        f"{peer.name} {mb} MB",
        comm.world_size,
        (ours.name, ours_s),
        (f"{peer.name} ({comm.backend})", peer_s),
        bool(equal.item()),
        size_bytes=mb * 10**6,
        bytes_sent=comm.ledger.bytes_sent,
        messages=comm.ledger.messages,
        bus_bandwidth=costs.bus_bandwidth(peer.name, comm.world_size, mb * 10**6, ours_s),
    )
