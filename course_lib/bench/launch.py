"""The launcher beside torch's own `spawn`, and a pool's run beside a launch.

A start is what a reader waits for: processes start, find each other, all_reduce one tensor, and are gone again.
The first launch of a session also starts the fork server (it imports torch); it is reported as
"first_launch_s" and is not part of the median.
"""

from __future__ import annotations

import datetime
import socket
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from course_lib import Pool, launch
from course_lib.bench.rows import BenchRow, row
from course_lib.comm.communicator import Communicator

ROUNDS = 5
POOL_RUNS = 50


def rows(world_sizes: Sequence[int]) -> list[BenchRow]:
    """For each world size: launch against spawn, and Pool.run against launch."""
    first_s, _ = timed(lambda: launch(add_one, world_size=1, show="none", backend="gloo"))
    return [found for n in world_sizes for found in (start(n, first_s), pool_run(n))]


def start(world_size: int, first_launch_s: float) -> BenchRow:
    ours, peers = [], []
    for _ in range(ROUNDS):
        ours.append(timed(lambda: launch(add_one, world_size=world_size, show="none", backend="gloo")))
        peers.append(timed(lambda: spawn(world_size)))
    equal = all(values == [float(world_size)] * world_size for _, values in ours + peers)
    return row(
        "launch",
        "start and all_reduce",
        world_size,
        ("launch", statistics.median(seconds for seconds, _ in ours)),
        ("torch.multiprocessing.spawn", statistics.median(seconds for seconds, _ in peers)),
        equal,
        first_launch_s=first_launch_s,
    )


def pool_run(world_size: int) -> BenchRow:
    ours, peers = [], []
    with Pool(world_size, show="none", backend="gloo") as pool:
        for run in range(POOL_RUNS):
            ours.append(timed(lambda: pool.run(rank_of)))
            if run % (POOL_RUNS // ROUNDS) == 0:
                peers.append(
                    timed(lambda: launch(rank_of, world_size=world_size, show="none", backend="gloo"))
                )
    equal = all(values == list(range(world_size)) for _, values in ours + peers)
    names = ("Pool.run", "launch")
    seconds = [statistics.median(seconds for seconds, _ in times) for times in (ours, peers)]
    return row("launch", "run a function", world_size, (names[0], seconds[0]), (names[1], seconds[1]), equal)


def timed(call: Callable[[], list]) -> tuple[float, list]:
    began = time.perf_counter()
    values = list(call())
    return time.perf_counter() - began, values


def rank_of(comm: Communicator) -> int:
    return comm.rank


def add_one(comm: Communicator) -> float:
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


def spawn(world_size: int) -> list[float]:
    """The same by torch's own means."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = torch.zeros(world_size).share_memory_()
    mp.spawn(_spawned, args=(world_size, port, values), nprocs=world_size)
    return values.tolist()


def _spawned(rank: int, world_size: int, port: int, values: torch.Tensor) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    one = torch.ones(1)
    dist.all_reduce(one)
    values[rank] = one.item()
    dist.destroy_process_group()
