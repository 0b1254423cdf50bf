"""What a message and a collective cost in time, on paper.

The model is the oldest of the field: R. W. Hockney, "The communication challenge for MPP: Intel Paragon and
Meiko CS-2" (1994). A message of n bytes takes

    t(n) = α + n/B

    α   alpha_s, latency: seconds that even an empty message takes
    B   rate, bandwidth: bytes per second (not bits), once bytes flow; papers write β for B or for 1/B
    N   world_size
    S   nbytes: bytes of the *whole* tensor that is reduced or gathered, never of a rank's piece

With it, a collective costs its steps, one after the other, times what a step costs. The model knows neither
adding (far faster than any link), nor waiting for a slow rank, nor whether two messages share a link: each
rank has one link that carries `rate` in each direction at the same time. `plan.traffic` counts the bytes and
messages themselves, exactly.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005), for trees and rings; R. Rabenseifner, "Optimization of Collective Reduction Operations" (2004); P.
Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), for the
ring and for the bound that it reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


def message_time_s(nbytes: float, alpha_s: float, rate: float) -> float:
    """α + n/B: one message between two ranks."""
    if nbytes < 0:
        raise ValueError(f"nbytes: expected 0 or more, got {nbytes}")
    if alpha_s < 0:
        raise ValueError(f"alpha_s: expected 0 seconds or more, got {alpha_s}")
    if not rate > 0:
        raise ValueError(f"rate: expected more than 0 bytes per second, got {rate}")
    return alpha_s + nbytes / rate


def reduce_time_s(world_size: int, nbytes: float, alpha_s: float, rate: float) -> float:
    """log2(N)·(α + S/B), log2 rounded up: a binary tree, each step with the whole tensor."""
    return _tree_steps(world_size) * message_time_s(nbytes, alpha_s, rate)


def broadcast_time_s(world_size: int, nbytes: float, alpha_s: float, rate: float) -> float:
    """log2(N)·(α + S/B): the same tree the other way."""
    return reduce_time_s(world_size, nbytes, alpha_s, rate)


def naive_all_reduce_time_s(world_size: int, nbytes: float, alpha_s: float, rate: float) -> float:
    """2(N-1)·(α + S/B): N-1 tensors into rank 0 and N-1 out of it, all through rank 0's link."""
    return 2 * (_checked(world_size) - 1) * message_time_s(nbytes, alpha_s, rate)


def tree_all_reduce_time_s(world_size: int, nbytes: float, alpha_s: float, rate: float) -> float:
    """2·log2(N)·(α + S/B): a reduce and a broadcast."""
    return 2 * reduce_time_s(world_size, nbytes, alpha_s, rate)


def ring_reduce_scatter_time_s(world_size: int, nbytes: float, alpha_s: float, rate: float) -> float:
    """(N-1)·(α + S/(N·B)): N-1 steps, one chunk in each."""
    return (_checked(world_size) - 1) * message_time_s(nbytes / world_size, alpha_s, rate)


def ring_all_gather_time_s(world_size: int, nbytes: float, alpha_s: float, rate: float) -> float:
    """(N-1)·(α + S/(N·B)); S is what every rank has at the end."""
    return ring_reduce_scatter_time_s(world_size, nbytes, alpha_s, rate)


def ring_all_reduce_time_s(world_size: int, nbytes: float, alpha_s: float, rate: float) -> float:
    """2(N-1)·(α + S/(N·B)): a reduce-scatter and an all-gather."""
    return 2 * ring_reduce_scatter_time_s(world_size, nbytes, alpha_s, rate)


def hierarchical_all_reduce_time_s(
    world_size: int,
    nbytes: float,
    alpha_s: float,
    rate: float,
    *,
    ranks_per_host: int,
    inside_alpha_s: float,
    inside_rate: float,
) -> float:
    """2(L-1)·(α' + S/(L·B')) + 2(H-1)·(α + S/(H·B)): rings inside H hosts of L ranks, and L across.

    α' and B' are `inside_alpha_s` and `inside_rate`, a link of one rank to another of its host. α and B are
    those of a *host's* link, which the L rings across share: each carries S/L, so together they take as long
    as one ring that carries S.
    """
    if ranks_per_host < 1 or _checked(world_size) % ranks_per_host:
        raise ValueError(f"ranks_per_host: expected a divisor of {world_size}, got {ranks_per_host}")
    inside = ring_all_reduce_time_s(ranks_per_host, nbytes, inside_alpha_s, inside_rate)
    return inside + ring_all_reduce_time_s(world_size // ranks_per_host, nbytes, alpha_s, rate)


def tree_ring_crossover_bytes(world_size: int, alpha_s: float, rate: float) -> float:
    """The S from which the ring is faster than the tree: where 2·log2(N)·(α + S/B) = 2(N-1)·(α + S/(N·B)).

    S = α·B · (N-1-T) / (T-(N-1)/N), with T = log2(N) rounded up. Below it, fewer steps win; above it, fewer
    bytes. For N = 2 it is 0: as many steps, and half the bytes in each.
    """
    steps = _tree_steps(world_size)
    if world_size == 1:
        return 0.0
    more_steps = world_size - 1 - steps
    fewer_tensors = steps - (world_size - 1) / world_size
    return message_time_s(0, alpha_s, rate) * rate * more_steps / fewer_tensors


def bus_bandwidth(collective: str, world_size: int, nbytes: float, seconds: float) -> float:
    """Bytes per second through each rank's link, if the algorithm is the best possible: S/t times a factor.

    2(N-1)/N for all_reduce, (N-1)/N for reduce_scatter and all_gather, 1 for broadcast and reduce. It can be
    compared with the hardware's bandwidth for any N, which S/t cannot. S is the whole tensor. The definition
    is that of NVIDIA's nccl-tests (PERFORMANCE.md).

    >>> bus_bandwidth("all_reduce", 4, 1e9, 1.0)
    1500000000.0
    """
    if collective not in BUS_FACTORS:
        raise ValueError(f"collective: expected one of {', '.join(BUS_FACTORS)}, got {collective!r}")
    if not seconds > 0:
        raise ValueError(f"seconds: expected more than 0, got {seconds}")
    if nbytes < 0:
        raise ValueError(f"nbytes: expected 0 or more, got {nbytes}")
    return nbytes / seconds * BUS_FACTORS[collective](_checked(world_size))


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(alpha_s, rate) of the line t = α + n/B through measured one-way times; `sizes` in bytes.

    Least squares of the *relative* errors. Times range over many powers of ten, and with absolute errors the
    largest message alone would decide, and α come out as noise, often negative. Should α come out below 0 all
    the same, it is 0. An infinite rate means that the times do not grow with the size.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(
            f"sizes, seconds: expected as many of both and two different sizes at least, "
            f"got {len(sizes)} and {len(seconds)}, {len(set(sizes))} different"
        )
    if min(sizes) < 0 or not min(seconds) > 0:
        raise ValueError("sizes, seconds: expected sizes of 0 or more and times above 0")
    # Minimise the sum of ((α + b·n - t) / t)², b = 1/B: a linear fit with weights w = 1/t².
    weights = [1 / t**2 for t in seconds]
    total = sum(weights)
    mean_n = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    covariance = sum(w * (n - mean_n) * (t - mean_t) for w, n, t in zip(weights, sizes, seconds, strict=True))
    variance = sum(w * (n - mean_n) ** 2 for w, n in zip(weights, sizes, strict=True))
    slope = covariance / variance
    alpha_s = mean_t - slope * mean_n
    if alpha_s < 0:  # the best line through the origin, with the same weights
        alpha_s, slope = 0.0, _through_origin(sizes, seconds)
    return alpha_s, 1 / slope if slope > 0 else math.inf


def _through_origin(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    ratios = [n / t for n, t in zip(sizes, seconds, strict=True)]
    return sum(ratios) / sum(ratio**2 for ratio in ratios)


def _tree_steps(world_size: int) -> int:
    """log2(N), rounded up."""
    return (_checked(world_size) - 1).bit_length()


def _checked(world_size: int) -> int:
    if world_size < 1:
        raise ValueError(f"world_size: expected 1 or more, got {world_size}")
    return world_size
