"""Two rings: one inside the host, where links are fast, and one across hosts, where they are not.

A flat ring over H hosts of L ranks sends nearly 2·S over each host's network link; so does this one. What it
saves is steps: 2(L-1) short hops inside and 2(H-1) across the network, where the flat ring waits for the slow
link in each of its 2(L·H-1) steps. Across, the L ranks of a host work at the same time, each on its own 1/L
of the tensor.

The idea is old and goes by several names; see R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005) for its building blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from course_lib.comm.communicator import Communicator
from course_lib.comm.ops import SUM, average_, check_op
from course_lib.comm.ring import gather_around, reduce_around
from course_lib.comm.views import chunks_of, flat_view
from course_lib.plan.traffic import SEGMENT_BYTES


def hierarchical_all_reduce(
    comm: Communicator,
    tensor: torch.Tensor,
    op: Any = SUM,
    *,
    ranks_per_host: int | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Reduce `tensor` over all ranks, in place, sending as little as possible between hosts.

    A reduce-scatter inside each host of L ranks, an all-reduce of one chunk across the H hosts, an all-gather
    inside. A rank sends 2(L-1)/L·S inside its host and 2(H-1)/H·S/L to another one. Which rank is on which
    host comes from `comm.host_of`, or ranks 0…L-1 are taken to be on the first one, if you pass L as
    `ranks_per_host`. Hosts with different numbers of ranks are refused: their chunks would not match.
    """
    name = check_op(op, tensor)
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ValueError(f"ranks_per_host: expected 1 or more, got {ranks_per_host}")
    host_of = (
        comm.host_of if ranks_per_host is None else [r // ranks_per_host for r in range(comm.world_size)]
    )
    hosts = _hosts(comm, host_of)
    with flat_view(comm, "hierarchical_all_reduce", tensor, name, "hosts of", len(hosts[0])) as flat:
        inside, across = _rings(comm, hosts)
        chunks = chunks_of(flat, inside.world_size)
        parts = chunks_of(chunks[inside.rank], across.world_size)
        reduce_around(inside, chunks, chunks, name, segment_bytes)
        reduce_around(across, parts, parts, name, segment_bytes)
        average_(name, parts[across.rank], comm.world_size)
        gather_around(across, parts, parts[across.rank])
        gather_around(inside, chunks, chunks[inside.rank])


def _hosts(comm: Communicator, host_of: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, in the order of the hosts' first ranks."""
    ranks = range(comm.world_size)
    hosts = [[rank for rank in ranks if host_of[rank] == host] for host in dict.fromkeys(host_of)]
    if len({len(host) for host in hosts}) > 1:
        raise ValueError(
            f"rank {comm.global_rank}: hierarchical_all_reduce: expected equally many ranks on every host, got "
            f"{[len(host) for host in hosts]}; use ring_all_reduce, which does not mind"
        )
    return hosts


def _rings(comm: Communicator, hosts: list[list[int]]) -> tuple[Communicator, Communicator]:
    """This rank's ring inside its host, and its ring across: the ranks at its place on all hosts."""
    mine = next(host for host in hosts if comm.rank in host)
    place = mine.index(comm.rank)
    inside, across = comm.subgroup(mine), comm.subgroup(sorted(host[place] for host in hosts))
    assert inside is not None and across is not None
    return inside, across
