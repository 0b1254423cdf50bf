"""Is a link what it says? Measured before every lab that compares times on limited links with a formula."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from course_lib.runtime.hosts import VirtualHosts
from course_lib.runtime.launcher import launch

TOLERANCE = 0.05
_SECONDS = 0.2  # how long a test message should take: long beside the latency, short for the reader
_TRIES, _ROUNDS = 5, 3
_MOST_BYTES = 50_000_000  # on a fast link the message is shorter than _SECONDS: memory is not free


class LinkNotAsSet(RuntimeError):
    """A link carries more or less than it should, so nothing measured on it could be compared with a formula."""


@dataclass(frozen=True)
class Calibration:
    """What the link between hosts 0 and 1 carried, in bytes per second: one way alone, and each way at once."""

    expected: float
    one_way: float
    both_ways: float
    label: str = ""

    def __str__(self) -> str:
        percent = lambda rate: f"{100 * rate / self.expected:.1f} %"
        link = f"link of {self.expected * 8 / 1e6:g} Mbit/s = {self.expected / 1e6:g} MB/s in each direction"
        label = f" ({self.label})" if self.label else ""
        return (
            f"{link}{label}: carries {percent(self.one_way)} of that one way, {percent(self.both_ways)} each way when "
            "both directions are busy"
        )


def calibrate(hosts: VirtualHosts) -> Calibration:
    """Send a message of about 0.2 s from host 0 to host 1, then one each way at once; the median of five tries.

    Raises LinkNotAsSet if either rate is more than 5 % off, three times over; ValueError for fewer than two hosts.
    """
    if hosts.num_hosts < 2:
        raise ValueError(
            f"calibrate: expected at least 2 hosts to have a link between, got {hosts.num_hosts}"
        )
    for _ in range(_ROUNDS - 1):  # a machine that was busy for a moment gets another chance
        try:
            return _measure(hosts)
        except LinkNotAsSet:
            pass
    return _measure(hosts)


def _measure(hosts: VirtualHosts) -> Calibration:
    num_bytes = min(max(4, round(hosts.bytes_per_s * _SECONDS)), _MOST_BYTES)
    seconds = launch(
        _send, num_bytes, world_size=hosts.ranks_per_host + 1, hosts=hosts, show="none", backend="gloo"
    )
    # The last rank is the first of host 1; it saw when the bytes had arrived.
    one_way, both_ways = (num_bytes / taken for taken in seconds[-1])
    found = Calibration(hosts.bytes_per_s, one_way, both_ways, hosts.label)
    if any(abs(rate / hosts.bytes_per_s - 1) > TOLERANCE for rate in (one_way, both_ways)):
        raise LinkNotAsSet(
            f"{found}. That is more than {TOLERANCE:.0%} off, so times measured on it would say nothing. Is the "
            "machine busy with something else? Stop that and run this cell again, or choose a slower link."
        )
    return found


def _send(comm, num_bytes: int) -> tuple[float, float]:
    last = comm.world_size - 1
    if comm.rank not in (0, last):
        return 0.0, 0.0
    pair = comm.subgroup([0, last])
    there, back = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    times = []
    for both in (False, True):
        tries = []
        for _ in range(_TRIES):
            pair.barrier()
            began = time.perf_counter()
            if both:
                pair.exchange(there, 1 - pair.rank, back, 1 - pair.rank)
            elif pair.rank == 0:
                pair.send(there, 1)
            else:
                pair.recv(back, 0)
            tries.append(time.perf_counter() - began)
        times.append(sorted(tries)[_TRIES // 2])
    return times[0], times[1]
