"""How N ranks combine their tensors, built from messages alone.

    naive          everybody sends to rank 0, which adds and sends back: its link carries 2(N-1)·S
    tree           a reduce and a broadcast along a binary tree: 2·log2(N) steps of S
    ring           a reduce-scatter and an all-gather: 2(N-1) steps of S/N, every link equally busy
    hierarchical   rings inside each host and, with 1/L of the tensor, across the hosts

N ranks, S bytes in the tensor, L ranks on a host. `plan.traffic` says exactly what each rank sends; the tests hold the
ledger against it. What has in common whatever is here:

* the result is bit for bit the same on all ranks: each element is reduced along one path and then copied;
* any length (not divisible by N, shorter than N, 0), any strides, N = 1; dtypes `ops.DTYPES`, reductions `ops`;
* sums are made in the tensor's own dtype, and AVG divides once, after the last addition, by N;
* they block, and every rank of `comm` must call them with the same length, dtype and reduction: the board sees a
  mismatch before a byte moves.

Sources: the ring is that of P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009); tree and the split into reduce-scatter and all-gather are described in R. Thakur, R. Rabenseifner and
W. Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from course_lib.comm.communicator import Communicator
from course_lib.comm.messages import copy_back, describe
from course_lib.comm.ops import AVG, MAX, MIN, PRODUCT, SUM, average_, check_op, combine
from course_lib.comm.stream import RingStream
from course_lib.plan.partition import chunk_sizes
from course_lib.plan.traffic import SEGMENT_BYTES

__all__ = [
    "AVG",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "broadcast",
    "hierarchical_all_reduce",
    "naive_all_reduce",
    "reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_all_reduce",
]

Tensors = list[torch.Tensor]


# --- naive


def naive_all_reduce(comm: Communicator, tensor: torch.Tensor, op: Any = SUM) -> None:
    """Reduce `tensor` over all ranks, in place: everybody sends to rank 0, which adds and sends back.

    Rank 0 sends and receives (N-1)·S bytes, every other rank S.
    """
    name = check_op(op, tensor)
    with _flat(comm, "naive_all_reduce", tensor, name) as flat:
        if comm.rank > 0:
            comm.send(flat, 0)
            comm.recv(flat, 0)
            return
        part = torch.empty_like(flat)
        for source in range(1, comm.world_size):
            comm.recv(part, source)
            combine(name, flat, part, out=flat)
        average_(name, flat, comm.world_size)
        for to in range(1, comm.world_size):
            comm.send(flat, to)


# --- tree


def tree_all_reduce(comm: Communicator, tensor: torch.Tensor, op: Any = SUM) -> None:
    """Reduce `tensor` over all ranks, in place: to rank 0 along a binary tree, and back along the same tree.

    2·log2(N) steps, rounded up. Every rank exchanges S bytes with its parent and S with each child.
    """
    name = check_op(op, tensor)
    with _flat(comm, "tree_all_reduce", tensor, name) as flat:
        _up_the_tree(comm, flat, 0, name)
        _down_the_tree(comm, flat, 0)


def reduce(comm: Communicator, tensor: torch.Tensor, root: int, op: Any = SUM) -> None:
    """Reduce `tensor` over all ranks along a binary tree. Only rank `root`'s `tensor` changes: it holds the result."""
    name = check_op(op, tensor)
    comm.check_root("reduce(root)", root)
    with _flat(comm, "tree_reduce", tensor, name, "to", root) as flat:
        _up_the_tree(comm, flat if comm.rank == root else flat.clone(), root, name)


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int) -> None:
    """Copy rank `root`'s `tensor` into every rank's, in place, along a binary tree."""
    comm.check_root("broadcast(root)", root)
    with _flat(comm, "tree_broadcast", tensor, "from", root) as flat:
        _down_the_tree(comm, flat, root)


def _up_the_tree(comm: Communicator, flat: torch.Tensor, root: int, name: str) -> None:
    """Halve the number of ranks that hold a part of the sum until only `root` is left. `flat` is used up elsewhere.

    `place` counts from the root. At distance d = 1, 2, 4, … each odd multiple of d hands its part to the place d below.
    """
    N, place = comm.world_size, (comm.rank - root) % comm.world_size
    part = torch.empty_like(flat)
    for distance in _powers_of_two(N):
        if place & distance:
            comm.send(flat, (comm.rank - distance) % N)
            return
        if place + distance < N:
            comm.recv(part, (comm.rank + distance) % N)
            combine(name, flat, part, out=flat)
    average_(name, flat, N)


def _down_the_tree(comm: Communicator, flat: torch.Tensor, root: int) -> None:
    """The same steps backwards, each in the other direction."""
    N, place = comm.world_size, (comm.rank - root) % comm.world_size
    for distance in reversed(_powers_of_two(N)):
        if place % (2 * distance) == distance:
            comm.recv(flat, (comm.rank - distance) % N)
        elif place % (2 * distance) == 0 and place + distance < N:
            comm.send(flat, (comm.rank + distance) % N)


def _powers_of_two(below: int) -> list[int]:
    return [1 << k for k in range((below - 1).bit_length())]


# --- ring


def ring_all_reduce(
    comm: Communicator, tensor: torch.Tensor, op: Any = SUM, *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Reduce `tensor` over all ranks, in place: a reduce-scatter around the ring, then an all-gather around it.

    2(N-1) steps. Each rank sends and receives 2(N-1)/N·S bytes.
    """
    name = check_op(op, tensor)
    with _flat(comm, "ring_all_reduce", tensor, name) as flat:
        chunks = _chunks(flat, comm.world_size)
        _reduce_around(comm, chunks, chunks, name, segment_bytes)
        average_(name, chunks[comm.rank], comm.world_size)
        _gather_around(comm, chunks, segment_bytes)


def ring_reduce_scatter(
    comm: Communicator,
    out: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = SUM,
    *,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Reduce `tensor` over all ranks; rank r gets chunk r of the result in `out`. `tensor` does not change.

    `out` has 1/N of `tensor`'s elements, or as many as `partition.chunk_sizes` says where that does not divide.
    N-1 steps. Each rank sends and receives (N-1)/N·S bytes.
    """
    name = check_op(op, tensor)
    _check_chunk(comm, "ring_reduce_scatter(out)", out, tensor)
    with comm.collective("ring_reduce_scatter", tensor, name), _dense(out) as mine:
        chunks = _chunks(tensor.detach().reshape(-1), comm.world_size)
        passing = torch.empty_like(chunks[0])  # sums of other ranks' chunks, on their way through
        sums = [passing[: len(chunk)] for chunk in chunks]
        sums[comm.rank] = mine
        if comm.world_size == 1:
            mine.copy_(chunks[0])  # nothing arrives, so nothing would be written
        _reduce_around(comm, chunks, sums, name, segment_bytes)
        average_(name, mine, comm.world_size)


def ring_all_gather(
    comm: Communicator, out: torch.Tensor, tensor: torch.Tensor, *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Every rank gives `tensor`, its chunk; all get the chunks side by side, in rank order, in `out`.

    `out` is N times as long as `tensor`, or its chunks are as long as `partition.chunk_sizes` says. `tensor` may be the
    rank's chunk of `out` itself. N-1 steps. Each rank sends and receives (N-1)/N·S bytes.
    """
    _check_chunk(comm, "ring_all_gather(tensor)", tensor, out)
    with comm.collective("ring_all_gather", out), _dense(out) as flat:
        chunks = _chunks(flat, comm.world_size)
        chunks[comm.rank].copy_(tensor.detach().reshape(-1))
        _gather_around(comm, chunks, segment_bytes)


def _reduce_around(comm: Communicator, chunks: Tensors, sums: Tensors, name: str, segment_bytes: int) -> None:
    """Step i: what is summed so far of chunk r-1-i goes to the right; to chunk r-2-i, from the left, we add ours.

    Chunk r comes last, from all the way round, so `sums[r]` is complete. With `sums` = `chunks` this is in place.
    """
    N, r = comm.world_size, comm.rank
    with RingStream(comm, chunks[0], segment_bytes) as stream:
        for step in range(N - 1):
            send, add = (r - 1 - step) % N, (r - 2 - step) % N
            outgoing = sums[send] if step > 0 else chunks[send]
            for sent, ours, total in stream.segments(outgoing, chunks[add], sums[add]):
                came = stream.slot(ours)
                stream.exchange(sent, came, then=partial(combine, name, came, ours, out=total))


def _gather_around(comm: Communicator, chunks: Tensors, segment_bytes: int) -> None:
    """Step i: chunk r-i, which is complete, goes to the right; chunk r-1-i comes from the left, to its place."""
    N, r = comm.world_size, comm.rank
    with RingStream(comm, chunks[0], segment_bytes) as stream:
        for step in range(N - 1):
            for sent, came in stream.segments(chunks[(r - step) % N], chunks[(r - 1 - step) % N]):
                stream.exchange(sent, came)


# --- hierarchical


def hierarchical_all_reduce(
    comm: Communicator,
    tensor: torch.Tensor,
    op: Any = SUM,
    *,
    ranks_per_host: int | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Reduce `tensor` over all ranks, in place, sending as little as possible between hosts.

    A reduce-scatter inside each host of L ranks, an all-reduce of one chunk across the H hosts, an all-gather inside.
    A rank sends 2(L-1)/L·S inside its host and 2(H-1)/H·S/L to another one. Which rank is on which host comes from
    `comm.host_of`, or ranks 0…L-1 are taken to be on the first one, if you pass L as `ranks_per_host`. Hosts with
    different numbers of ranks are refused: their chunks would not match.
    """
    name = check_op(op, tensor)
    host_of = (
        comm.host_of if ranks_per_host is None else [r // ranks_per_host for r in range(comm.world_size)]
    )
    hosts = _hosts(comm, host_of)
    with _flat(comm, "hierarchical_all_reduce", tensor, name, "hosts of", len(hosts[0])) as flat:
        inside, across = _rings(comm, hosts)
        chunks = _chunks(flat, inside.world_size)
        parts = _chunks(chunks[inside.rank], across.world_size)
        _reduce_around(inside, chunks, chunks, name, segment_bytes)
        _reduce_around(across, parts, parts, name, segment_bytes)
        average_(name, parts[across.rank], comm.world_size)
        _gather_around(across, parts, segment_bytes)
        _gather_around(inside, chunks, segment_bytes)


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
    """This rank's ring inside its host, and its ring across: the ranks at the same place on the other hosts."""
    mine = next(host for host in hosts if comm.rank in host)
    place = mine.index(comm.rank)
    inside, across = comm.subgroup(mine), comm.subgroup(sorted(host[place] for host in hosts))
    assert inside is not None and across is not None
    return inside, across


# --- what all share


def _chunks(flat: torch.Tensor, n: int) -> Tensors:
    return list(flat.split(chunk_sizes(flat.numel(), n)))


@contextmanager
def _flat(comm: Communicator, name: str, tensor: torch.Tensor, *words: object) -> Iterator[torch.Tensor]:
    """Enter the collective `name` with `tensor` in one dimension; what is written there ends up in `tensor`."""
    comm.check_tensor(f"{name}(tensor)", tensor)
    with comm.collective(name, tensor, *words), _dense(tensor) as flat:
        yield flat


@contextmanager
def _dense(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """`tensor` in one dimension: its own memory where that lies side by side, else a copy that is copied back."""
    detached = tensor.detach()  # writing into a parameter is allowed here, as in torch's collectives
    dense = detached.contiguous()
    yield dense.view(-1)
    copy_back(dense, detached)


def _check_chunk(comm: Communicator, argument: str, chunk: torch.Tensor, whole: torch.Tensor) -> None:
    comm.check_tensor(argument, chunk)
    comm.check_tensor(argument, whole)
    expected = chunk_sizes(whole.numel(), comm.world_size)[comm.rank]
    if chunk.numel() != expected or chunk.dtype != whole.dtype:
        raise ValueError(
            f"rank {comm.global_rank}: {argument}: expected {expected} x {whole.dtype}, this rank's chunk of "
            f"{describe(whole)} over {comm.world_size} ranks, got {describe(chunk)}"
        )
