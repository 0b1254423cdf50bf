"""The ring: each rank sends to its right neighbour only, and every link is equally busy.

Cut the tensor into N chunks. In the *reduce-scatter*, partial sums travel: in each of N-1 steps a rank passes
one chunk on to the right, and adds its own values to the chunk that comes from the left. A sum that set out
from rank r+1 has gone all the way round when it reaches rank r, so rank r then holds the complete chunk r. In
the *all-gather*, the complete chunks travel round once more, N-1 steps, and are only copied: so all ranks end
with the same bits.

Each rank sends 2(N-1) chunks of S/N bytes, less than 2·S however many ranks there are, and no algorithm can
do with less: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009). What does grow with N is the number of steps, so for small tensors a tree is faster.

While a sum is on its way, a long chunk goes in segments (`stream.py`): that changes when things happen, not
what is computed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from course_lib.comm.communicator import Communicator
from course_lib.comm.messages import copy_back
from course_lib.comm.ops import SUM, average_, check_op, combine
from course_lib.comm.stream import Hop, Segments, send_around
from course_lib.comm.views import check_chunk, chunks_of, dense_view, flat_view
from course_lib.plan.traffic import SEGMENT_BYTES


def ring_all_reduce(
    comm: Communicator, tensor: torch.Tensor, op: Any = SUM, *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Reduce `tensor` over all ranks, in place: a reduce-scatter, then an all-gather, around the ring.

    2(N-1) steps. Each rank sends and receives 2(N-1)/N·S bytes.
    """
    name = check_op(op, tensor)
    with flat_view(comm, "ring_all_reduce", tensor, name) as flat:
        chunks = chunks_of(flat, comm.world_size)
        reduce_around(comm, chunks, chunks, name, segment_bytes)
        average_(name, chunks[comm.rank], comm.world_size)
        gather_around(comm, chunks, chunks[comm.rank])


def ring_reduce_scatter(
    comm: Communicator,
    out: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = SUM,
    *,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Reduce `tensor` over all ranks; rank r gets chunk r of the result in `out`. `tensor` does not change.

    `out` has 1/N of `tensor`'s elements, or as many as `partition.chunk_sizes` says where that does not
    divide. N-1 steps. Each rank sends and receives (N-1)/N·S bytes.
    """
    name = check_op(op, tensor)
    check_chunk(comm, "ring_reduce_scatter(out)", out, tensor)
    with comm.collective("ring_reduce_scatter", tensor, name), dense_view(out) as mine:
        chunks = chunks_of(tensor.detach().reshape(-1), comm.world_size)
        passing = torch.empty_like(chunks[0])  # sums of other ranks' chunks, on their way through
        sums = [passing[: len(chunk)] for chunk in chunks]
        sums[comm.rank] = mine
        if comm.world_size == 1:
            mine.copy_(chunks[0])  # nothing arrives, so nothing would be written
        reduce_around(comm, chunks, sums, name, segment_bytes)
        average_(name, mine, comm.world_size)


def ring_all_gather(comm: Communicator, out: torch.Tensor, tensor: torch.Tensor) -> None:
    """Every rank gives `tensor`, its chunk; all get the chunks side by side, in rank order, in `out`.

    `out` is N times as long as `tensor`, or its chunks are as long as `partition.chunk_sizes` says. `tensor`
    may be the rank's chunk of `out` itself. N-1 steps. Each rank sends and receives (N-1)/N·S bytes.
    """
    check_chunk(comm, "ring_all_gather(tensor)", tensor, out)
    with comm.collective("ring_all_gather", out), dense_view(out) as flat:
        chunks = chunks_of(flat, comm.world_size)
        gather_around(comm, chunks, tensor.detach().reshape(-1))


def reduce_around(
    comm: Communicator, chunks: list[torch.Tensor], sums: list[torch.Tensor], name: str, segment_bytes: int
) -> None:
    """Step i: the sum so far of chunk r-1-i goes to the right; that of chunk r-2-i comes, and we add ours.

    Chunk r comes last, from all the way round, so `sums[r]` is complete. With `sums` = `chunks` the sums are
    made in place.
    """
    N, r = comm.world_size, comm.rank
    segments, hops = Segments(comm, chunks[0], segment_bytes), []
    for step in range(N - 1):
        send, add = (r - 1 - step) % N, (r - 2 - step) % N
        outgoing = sums[send] if step > 0 else chunks[send]
        for sent, ours, total in segments.of(outgoing, chunks[add], sums[add]):
            came = segments.slot(ours)
            hops.append(Hop(sent, came, then=partial(combine, name, came, ours, out=total)))
    send_around(comm, hops, segments.window)


def gather_around(comm: Communicator, chunks: list[torch.Tensor], mine: torch.Tensor) -> None:
    """Step i: chunk r-i, which is complete, goes to the right; chunk r-1-i comes from the left, to its place.

    Nothing is added, so there is no reason for segments. `mine` is chunk r; if it is not in its place yet, it is
    copied there while the bytes of the first step travel.
    """
    N, r = comm.world_size, comm.rank
    complete = [mine if chunk is chunks[r] else chunk for chunk in chunks]
    hops = [Hop(complete[(r - step) % N], chunks[(r - 1 - step) % N]) for step in range(N - 1)]
    send_around(comm, hops, meanwhile=lambda: copy_back(mine, chunks[r]))
    if N == 1:
        copy_back(mine, chunks[r])  # nothing travels
