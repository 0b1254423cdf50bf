"""How two ways of doing the same thing are timed, and what a row of results holds.

A machine is never equally busy for long, so the two take turns, in the same processes, and each gets the
median of its runs. A run is as long as its slowest rank took.

A row is a dict: "bench", "case", "world_size"; "ours" and "peer", the two names; "ours_s" and "peer_s", the
medians in seconds; "ratio" = ours_s / peer_s (below 1: ours is faster); "equal": both gave the same result in
that very run. What else a bench measures has further keys.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from course_lib.comm.communicator import Communicator

BenchRow = dict[str, Any]


def row(
    bench: str,
    case: str,
    world_size: int,
    ours: tuple[str, float],
    peer: tuple[str, float],
    equal: bool,
    **more: Any,
) -> BenchRow:
    """`ours` and `peer`: a name and its median seconds."""
    return {
        "bench": bench,
        "case": case,
        "world_size": world_size,
        "ours": ours[0],
        "ours_s": ours[1],
        "peer": peer[0],
        "peer_s": peer[1],
        "ratio": ours[1] / peer[1],
        "equal": equal,
        **more,
    }


class Runner(Protocol):
    """What is timed: `call`, and not what `prepare` does before it."""

    @property
    def call(self) -> Callable[[], Any]: ...
    def prepare(self) -> None: ...


def take_turns(comm: Communicator, runners: Sequence[Runner], runs: int) -> list[float]:
    """The median seconds of each runner, the same on all ranks.

    After it, each holds the result of its last run.
    """
    times: list[list[float]] = [[] for _ in runners]
    for run in range(-2, runs):  # two to warm up
        for runner, seconds_of in zip(runners, times, strict=True):
            runner.prepare()
            comm.barrier()
            start = time.perf_counter()
            runner.call()
            if comm.device.type == "cuda":
                torch.cuda.synchronize(comm.device)
            seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=comm.device)
            comm.all_reduce(seconds, "max")
            if run >= 0:
                seconds_of.append(seconds.item())
    return [statistics.median(of_runner) for of_runner in times]


def table(rows: Sequence[BenchRow]) -> str:
    """The rows as text."""
    lines = [("case", "ranks", "ours", "ms", "PyTorch", "ms", "ratio", "equal")]
    for one in rows:
        times = f"{one['ours_s'] * 1e3:.2f}", f"{one['peer_s'] * 1e3:.2f}"
        lines.append(
            (
                one["case"],
                str(one["world_size"]),
                one["ours"],
                times[0],
                one["peer"],
                times[1],
                f"{one['ratio']:.2f}",
                "yes" if one["equal"] else "NO",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
