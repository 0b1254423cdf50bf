"""The graders against right solutions that the library does not know, and against wrong ones.

Each wrong solution has one fault, as a learner would make it. What each grader said of each is printed at the end of
the run. The functions go to the ranks by value, as those of a notebook do.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from course_lib.classroom.checks import check
from course_lib.classroom.checks.exercises import EXERCISES
from course_lib.comm import collectives
from course_lib.plan.partition import chunk_bounds
from tests.classroom.planted import Planted

PLANTED = Planted(EXERCISES)
fault, right = PLANTED.fault, PLANTED.right


# --- helpers of the solutions below


def cut(flat, n):
    return [flat[start:stop] for start, stop in chunk_bounds(len(flat), n)]


def ring(comm, chunks, first, add):
    """N-1 steps: chunk `first`, then the one below it, and so on, go right; what comes is added or copied."""
    N, r = comm.world_size, comm.rank
    for step in range(N - 1):
        here, there = chunks[(first - step) % N], chunks[(first - step - 1) % N]
        came = torch.empty_like(there)
        comm.exchange(here, (r + 1) % N, came, (r - 1) % N)
        there.copy_(there + came if add else came)


def combine(op, a, b):
    return torch.maximum(a, b) if op == "max" else a + b


# --- ring all-reduce: right


@right("ring_all_reduce")
def classic_ring(comm, tensor):
    """Chunk r+1 ends on rank r, as in most texts."""
    flat = tensor.contiguous().view(-1)
    chunks = cut(flat, comm.world_size)
    ring(comm, chunks, comm.rank, add=True)
    ring(comm, chunks, comm.rank + 1, add=False)
    tensor.copy_(flat.view(tensor.shape))


@right("ring_all_reduce")
def ring_to_the_left(comm, tensor, op="sum"):
    """The other way round, with empty chunks left out, asynchronously, and with op."""
    N, r = comm.world_size, comm.rank
    left, flat = (r - 1) % N, tensor.reshape(-1).clone()
    chunks = cut(flat, N)

    def step(send, recv):
        came = torch.empty_like(recv)
        comm.exchange(send, left, came, (r + 1) % N, async_op=True).wait()
        return came

    for i in range(N - 1):
        target = chunks[(r + 2 + i) % N]
        target.copy_(combine(op, target, step(chunks[(r + 1 + i) % N], target)))
    if op == "avg":
        chunks[r] /= N
    for i in range(N - 1):
        target = chunks[(r + 1 + i) % N]
        target.copy_(step(chunks[(r + i) % N], target))
    tensor.copy_(flat.view_as(tensor))


# --- ring all-reduce: wrong


@fault(
    "ring_all_reduce",
    "right sum, but each rank sent 96 bytes = (N-1)*S where a ring sends 2*(N-1)/N*S = 64 (3 ranks",
)
def whole_tensors(comm, tensor):
    N, passing = comm.world_size, tensor.clone()
    for _ in range(N - 1):
        came = torch.empty_like(passing)
        comm.exchange(passing, (comm.rank + 1) % N, came, (comm.rank - 1) % N)
        tensor += came
        passing = came


@fault(
    "ring_all_reduce",
    "wrong sum: rank 0 ended with 106 at position 6, where 312 is right",
    "(2 ranks, 7 float32)",
)
def drops_the_rest(comm, tensor):
    """length // N: what is left over is never sent."""
    N, flat = comm.world_size, tensor.reshape(-1).clone()
    size = len(flat) // N
    chunks = [flat[i * size : (i + 1) * size] for i in range(N)]
    ring(comm, chunks, comm.rank, add=True)
    ring(comm, chunks, comm.rank + 1, add=False)
    tensor.copy_(flat.view_as(tensor))


@fault(
    "ring_all_reduce",
    "right sum, but each rank sent 32 bytes where a ring sends 2*(N-1)/N*S = 28 (2 ranks, 7 float32)",
)
def pads(comm, tensor):
    """Right, with more bytes than it needs."""
    N, flat = comm.world_size, tensor.reshape(-1)
    padded = torch.zeros(-(-len(flat) // N) * N, dtype=tensor.dtype)
    padded[: len(flat)] = flat
    chunks = cut(padded, N)
    ring(comm, chunks, comm.rank, add=True)
    ring(comm, chunks, comm.rank + 1, add=False)
    tensor.copy_(padded[: len(flat)].view_as(tensor))


@fault("ring_all_reduce", "right sum, but on rank 0 a tensor has other memory or another shape than before")
def points_elsewhere(comm, tensor):
    total = tensor.clone()
    classic_ring(comm, total)
    tensor.data = total


@fault("ring_all_reduce", "wrong sum", "(3 ranks, 12 float32)")
def only_two_ranks(comm, tensor):
    """One step instead of N-1."""
    N, r = comm.world_size, comm.rank
    if N == 1:
        return
    flat = tensor.reshape(-1).clone()
    chunks = cut(flat, N)
    for first, add in ((r, True), (r + 1, False)):
        came = torch.empty_like(chunks[(first - 1) % N])
        comm.exchange(chunks[first % N], (r + 1) % N, came, (r - 1) % N)
        chunks[(first - 1) % N].copy_(chunks[(first - 1) % N] + came if add else came)
    tensor.copy_(flat.view_as(tensor))


@fault(
    "ring_all_reduce", "wrong sum: rank 0 ended with 100 at position 0", "its own value", "transposed view"
)
def loses_a_copy(comm, tensor):
    """reshape(-1) of a transposed tensor is a copy, which nobody brings back."""
    chunks = cut(tensor.reshape(-1), comm.world_size)
    ring(comm, chunks, comm.rank, add=True)
    ring(comm, chunks, comm.rank + 1, add=False)


@fault(
    "ring_all_reduce", "rank 0 raised RuntimeError at `flat = tensor.view(-1)`: view size is not compatible"
)
def cannot_view(comm, tensor):
    flat = tensor.view(-1)
    chunks = cut(flat, comm.world_size)
    ring(comm, chunks, comm.rank, add=True)
    ring(comm, chunks, comm.rank + 1, add=False)


@fault(
    "ring_all_reduce",
    "it does not end: rank 0 waits in send of 24 bytes to rank 1 and rank 1 waits",
    timeout=1.5,
)
def all_send_first(comm, tensor):
    N, r = comm.world_size, comm.rank
    chunks = cut(tensor.reshape(-1), N)
    for step in range(N - 1):
        comm.send(chunks[(r - step) % N], (r + 1) % N)
        came = torch.empty_like(chunks[(r - step - 1) % N])
        comm.recv(came, (r - 1) % N)
        chunks[(r - step - 1) % N] += came


@fault("ring_all_reduce", "right sum, but rank 0 called torch's all_reduce: build it")
def torchs_own(comm, tensor):
    comm.all_reduce(tensor)


@fault("ring_all_reduce", "right sum, but rank 0 called torch's all_reduce: build it")
def plain_torch(comm, tensor):
    dense = tensor.contiguous()
    dist.all_reduce(dense)
    tensor.copy_(dense)


@fault("ring_all_reduce", "right sum, but the ledger counted no message of it")
def uncounted(comm, tensor):
    """torch's own send and receive."""
    N, r, total = comm.world_size, comm.rank, tensor.contiguous().clone()
    passing = total.clone()
    for _ in range(N - 1):
        came = torch.empty_like(passing)
        works = [dist.irecv(came, (r - 1) % N), dist.isend(passing, (r + 1) % N)]
        for work in works:
            work.wait()
        total, passing = total + came, came
    tensor.copy_(total)


@fault("ring_all_reduce", "right sum, but rank 0 called the library's ring_all_reduce")
def librarys_own(comm, tensor):
    collectives.ring_all_reduce(comm, tensor)


@fault("ring_all_reduce", "right sum, but the ranks do not end with the same bits: at position")
def other_bits(comm, tensor):
    """After the right messages every rank takes *its own* order of additions for its result."""
    before = tensor.clone()
    classic_ring(comm, tensor)
    if tensor.is_floating_point():
        tensor.copy_((tensor - before) + before)


@fault("ring_all_reduce", "wrong sum", "divided by 2", "op=avg", "(2 ranks")
def divides_twice(comm, tensor, op="sum"):
    ring_to_the_left(comm, tensor, op)
    if op == "avg":
        tensor /= comm.world_size


@fault(
    "ring_all_reduce",
    "right sum, but each rank sent 3 messages where a ring sends 2*(N-1) = 2 (2 ranks, 12 float32)",
)
def says_hello_first(comm, tensor):
    N, r = comm.world_size, comm.rank
    if N > 1:
        comm.exchange(torch.empty(0), (r + 1) % N, torch.empty(0), (r - 1) % N)
    classic_ring(comm, tensor)


@fault("ring_all_reduce", "rank 0 sends 24 bytes to rank 1, which has room for 12", "(2 ranks, 5 float64)")
def only_float32(comm, tensor):
    """The receive buffer is always float32: too small for float64."""
    N, r, flat = comm.world_size, comm.rank, tensor.reshape(-1).clone()
    chunks = cut(flat, N)
    for first, add in ((r, True), (r + 1, False)):
        for step in range(N - 1):
            target = chunks[(first - step - 1) % N]
            came = torch.empty(len(target))
            comm.exchange(chunks[(first - step) % N], (r + 1) % N, came, (r - 1) % N)
            target.copy_(target + came if add else came)
    tensor.copy_(flat.view_as(tensor))


@fault(
    "ring_all_reduce", "rank 0 returned the right sum, but `tensor` does not hold it", "(2 ranks, 12 float32)"
)
def returns_a_new_tensor(comm, tensor):
    if comm.world_size == 1:
        return None
    result = tensor.clone()
    classic_ring(comm, result)
    return result


@fault(
    "ring_all_reduce",
    "right sum, but rank 0 returned a tensor of shape (12,): the result belongs into `tensor`",
)
def returns_it_too(comm, tensor):
    classic_ring(comm, tensor)
    return tensor


@fault("ring_all_reduce", "it does not end: rank 2 has returned, but rank 0 waits in exchange", timeout=1.5)
def leaves_early(comm, tensor):
    if comm.rank != 2:
        classic_ring(comm, tensor)


@fault(
    "ring_all_reduce", "the process of rank 1 ended with exit code 3 before your function returned (2 ranks"
)
def ends_its_process(comm, tensor):
    if comm.rank == 1:
        os._exit(3)
    classic_ring(comm, tensor)


@fault(
    "ring_all_reduce",
    "rank 2 raised ZeroDivisionError at `1 / (comm.rank - 2)`: division by zero (3 ranks, 12 float32)",
)
def raises_on_one_rank(comm, tensor):
    1 / (comm.rank - 2)
    classic_ring(comm, tensor)


@fault("ring_all_reduce", "it does not end: rank 0 is still computing (1 rank, 12 float32)", timeout=1.0)
def endless(comm, tensor):
    while True:
        pass


@fault(
    "ring_all_reduce",
    "it does not end: rank 0 goes on sending and receiving (2 ranks, 12 float32)",
    timeout=1.5,
)
def endless_ring(comm, tensor):
    while comm.world_size > 1:
        classic_ring(comm, tensor.clone())


@fault(
    "ring_all_reduce",
    "rank 0 raised ValueError at `comm.exchange(tensor, comm.rank + 1",
    "expected a rank of this communicator",
    "1 rank",
)
def forgets_modulo(comm, tensor):
    comm.exchange(tensor, comm.rank + 1, torch.empty_like(tensor), comm.rank - 1)


@fault(
    "ring_all_reduce",
    "right sum, but rank 0 sent to rank 1 and rank 2; in a ring a rank sends to one neighbour only",
)
def everybody_to_everybody(comm, tensor):
    """As many bytes as a ring, but all links at once."""
    N, r, flat = comm.world_size, comm.rank, tensor.reshape(-1).clone()
    chunks = cut(flat, N)
    mine = chunks[r].clone()
    for d in range(1, N):
        came = torch.empty_like(chunks[r])
        comm.exchange(chunks[(r + d) % N], (r + d) % N, came, (r - d) % N)
        mine += came
    chunks[r].copy_(mine)
    for d in range(1, N):
        came = torch.empty_like(chunks[(r - d) % N])
        comm.exchange(mine, (r + d) % N, came, (r - d) % N)
        chunks[(r - d) % N].copy_(came)
    tensor.copy_(flat.view_as(tensor))


# --- ring reduce-scatter


def scatter_ring(comm, flat):
    """Chunk r complete on rank r, in a copy."""
    flat = flat.reshape(-1).clone()
    chunks = cut(flat, comm.world_size)
    ring(comm, chunks, comm.rank - 1, add=True)
    return chunks


@right("ring_reduce_scatter")
def plain_scatter(comm, out, tensor):
    out.copy_(scatter_ring(comm, tensor)[comm.rank])


@right("ring_reduce_scatter")
def scatter_to_the_left(comm, out, tensor, op="sum"):
    N, r = comm.world_size, comm.rank
    chunks = cut(tensor.reshape(-1), N)
    passing = chunks[(r + 1) % N].clone()
    for i in range(N - 1):
        came = torch.empty_like(chunks[(r + 2 + i) % N])
        comm.exchange(passing, (r - 1) % N, came, (r + 1) % N)
        passing = combine(op, came, chunks[(r + 2 + i) % N])
    out.copy_(chunks[r] if N == 1 else passing)
    if op == "avg":
        out /= N


@fault(
    "ring_reduce_scatter",
    "wrong sum: rank 0 ended with 312 at position 0, where 300 is right",
    "position 6, in the wrong place",
)
def neighbours_chunk(comm, out, tensor):
    """The classic ring leaves chunk r+1 on rank r."""
    flat = tensor.reshape(-1).clone()
    chunks = cut(flat, comm.world_size)
    ring(comm, chunks, comm.rank, add=True)
    out.copy_(chunks[(comm.rank + 1) % comm.world_size])


@fault("ring_reduce_scatter", "right sum, but on rank 0 `tensor` changed (2 ranks, 12 float32)")
def works_in_the_input(comm, out, tensor):
    chunks = cut(tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1), comm.world_size)
    ring(comm, chunks, comm.rank - 1, add=True)
    out.copy_(chunks[comm.rank])


@fault(
    "ring_reduce_scatter",
    "right sum, but each rank sent 48 bytes = S where a ring sends (N-1)/N*S = 24 (2 ranks",
)
def all_reduce_and_cut(comm, out, tensor):
    whole = tensor.reshape(-1).clone()
    classic_ring(comm, whole)
    out.copy_(cut(whole, comm.world_size)[comm.rank])


@fault(
    "ring_reduce_scatter",
    "right sum, but each rank sent 48 bytes = S where a ring sends (N-1)/N*S = 24 (2 ranks",
)
def passes_whole_tensors(comm, out, tensor):
    whole = tensor.contiguous().clone()
    whole_tensors(comm, whole)
    out.copy_(cut(whole.view(-1), comm.world_size)[comm.rank])


@fault(
    "ring_reduce_scatter",
    "right sum, but rank 0 sent to rank 1 and rank 2; in a ring a rank sends to one neighbour only",
)
def straight_to_the_owner(comm, out, tensor):
    N, r = comm.world_size, comm.rank
    chunks = cut(tensor.reshape(-1), N)
    out.copy_(chunks[r])
    for d in range(1, N):
        came = torch.empty_like(chunks[r])
        comm.exchange(chunks[(r + d) % N], (r + d) % N, came, (r - d) % N)
        out += came


@fault(
    "ring_reduce_scatter",
    "wrong sum: rank 0 ended with 77 at position 0, where 100 is right: nothing was written",
    "1 rank",
)
def forgets_one_rank(comm, out, tensor):
    if comm.world_size > 1:
        plain_scatter(comm, out, tensor)


@fault("ring_reduce_scatter", "right sum, but rank 0 called torch's reduce_scatter")
def torchs_reduce_scatter(comm, out, tensor):
    N = comm.world_size
    if tensor.numel() % N == 0:
        comm.reduce_scatter(out, tensor.contiguous())
    else:
        plain_scatter(comm, out, tensor)


@fault(
    "ring_reduce_scatter",
    "rank 0 raised RuntimeError at `out.copy_(chunks[comm.rank])`",
    "(2 ranks, 7 float32)",
)
def equal_chunks_only(comm, out, tensor):
    """Chunks of length // N; the first must be one longer."""
    N, flat = comm.world_size, tensor.reshape(-1).clone()
    size = len(flat) // N
    chunks = [flat[i * size : (i + 1) * size] for i in range(N)]
    ring(comm, chunks, comm.rank - 1, add=True)
    out.copy_(chunks[comm.rank])


@fault("ring_reduce_scatter", "rank 0 returned the right sum, but `out` does not hold it")
def returns_its_chunk(comm, out, tensor):
    return scatter_ring(comm, tensor)[comm.rank]


@fault("ring_reduce_scatter", "wrong sum", "divided by 2 once more", "op=avg")
def averages_twice(comm, out, tensor, op="sum"):
    scatter_to_the_left(comm, out, tensor, op)
    if op == "avg":
        out.div_(comm.world_size)


@fault(
    "ring_reduce_scatter",
    "it does not end: rank 0 waits in recv of 24 bytes from rank 1 and rank 1 waits in recv",
    timeout=1.5,
)
def all_receive_first(comm, out, tensor):
    N, r = comm.world_size, comm.rank
    chunks = cut(tensor.reshape(-1).clone(), N)
    out.copy_(chunks[r])
    for step in range(N - 1):
        comm.recv(chunks[(r - 2 - step) % N], (r - 1) % N)
        comm.send(chunks[(r - 1 - step) % N], (r + 1) % N)


@fault(
    "ring_reduce_scatter",
    "your function takes (comm, tensor); the exercise calls it with (comm, out, tensor)",
)
def without_out(comm, tensor):
    classic_ring(comm, tensor)


# --- tree all-reduce


@right("tree_all_reduce")
def binomial(comm, tensor):
    part, d = torch.empty_like(tensor), 1
    while d < comm.world_size:
        if comm.rank % (2 * d) == d:
            comm.send(tensor, comm.rank - d)
            break
        if comm.rank + d < comm.world_size:
            comm.recv(part, comm.rank + d)
            tensor += part
        d *= 2
    down(comm, tensor)


def down(comm, tensor):
    d = 1 << max(0, (comm.world_size - 1).bit_length() - 1)
    while d >= 1:
        if comm.rank % (2 * d) == d:
            comm.recv(tensor, comm.rank - d)
        elif comm.rank % (2 * d) == 0 and comm.rank + d < comm.world_size:
            comm.send(tensor, comm.rank + d)
        d //= 2


@right("tree_all_reduce")
def heap_tree(comm, tensor, op="sum"):
    """The children of r are 2r+1 and 2r+2: another tree, the same traffic."""
    children = [c for c in (2 * comm.rank + 1, 2 * comm.rank + 2) if c < comm.world_size]
    for child in children:
        part = torch.empty_like(tensor)
        comm.recv(part, child)
        tensor.copy_(combine(op, tensor, part))
    if comm.rank > 0:
        comm.send(tensor, (comm.rank - 1) // 2)
        comm.recv(tensor, (comm.rank - 1) // 2)
    elif op == "avg":
        tensor /= comm.world_size
    for child in children:
        comm.send(tensor, child)


@fault(
    "tree_all_reduce",
    "right sum, but rank 0 sent 144 bytes where no rank of a tree sends more than 96 (4 ranks",
)
def star(comm, tensor):
    collectives_free_star(comm, tensor)


def collectives_free_star(comm, tensor):
    others = range(1, comm.world_size)
    if comm.rank:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    for other in others:
        part = torch.empty_like(tensor)
        comm.recv(part, other)
        tensor += part
    for other in others:
        comm.send(tensor, other)


@fault(
    "tree_all_reduce",
    "right sum, but the result went through 6 hands, one after the other",
    "2*log2(N) = 4 (4 ranks",
)
def chain(comm, tensor):
    r, last = comm.rank, comm.world_size - 1
    if r < last:
        part = torch.empty_like(tensor)
        comm.recv(part, r + 1)
        tensor += part
    if r > 0:
        comm.send(tensor, r - 1)
        comm.recv(tensor, r - 1)
    if r < last:
        comm.send(tensor, r + 1)


@fault("tree_all_reduce", "it does not end", "(3 ranks, 12 float32)", timeout=1.5)
def powers_of_two_only(comm, tensor):
    """Everybody always has a partner, with N = 3 as well."""
    d = 1
    while d < comm.world_size:
        if comm.rank % (2 * d) == d:
            comm.send(tensor, comm.rank - d)
            break
        part = torch.empty_like(tensor)
        comm.recv(part, (comm.rank + d) % comm.world_size)
        tensor += part
        d *= 2
    down(comm, tensor)


@fault(
    "tree_all_reduce",
    "wrong sum: rank 1 ended with 200 at position 0, where 300 is right: its own value, as it was before",
)
def forgets_the_way_down(comm, tensor):
    d = 1
    while d < comm.world_size:
        if comm.rank % (2 * d) == d:
            comm.send(tensor, comm.rank - d)
            break
        if comm.rank + d < comm.world_size:
            part = torch.empty_like(tensor)
            comm.recv(part, comm.rank + d)
            tensor += part
        d *= 2


@fault(
    "tree_all_reduce",
    "wrong sum: rank 1 ended with 500 at position 0, where 300 is right: rank 1's value was added twice",
)
def adds_on_the_way_down(comm, tensor):
    mine = tensor.clone()
    binomial(comm, tensor)
    if comm.rank:
        tensor += mine


@fault(
    "tree_all_reduce",
    "right sum, but the ranks sent 384 bytes in all where a tree sends 2*(N-1)*S = 288 (4 ranks",
)
def recursive_doubling(comm, tensor):
    """Nobody waits for the way down; it costs N*log2(N) messages. With N = 3: the tree."""
    N, d = comm.world_size, 1
    if N & (N - 1) or N == 2:
        return binomial(comm, tensor)
    while d < N:
        part = torch.empty_like(tensor)
        comm.exchange(tensor, comm.rank ^ d, part, comm.rank ^ d)
        tensor.add_(part)
        d *= 2
    return None


@fault(
    "tree_all_reduce",
    "right sum, but the ranks sent 288 bytes in all where a tree sends 2*(N-1)*S = 192 (3 ranks, 12 float32)",
)
def gathers_all(comm, tensor):
    whole_tensors(comm, tensor)


@fault(
    "tree_all_reduce",
    "right sum, but the ranks sent 3 messages in all where a tree sends 2*(N-1) = 2 (2 ranks",
)
def says_ready(comm, tensor):
    if comm.world_size > 1 and comm.rank == 1:
        comm.send(torch.empty(0), 0)
    if comm.world_size > 1 and comm.rank == 0:
        comm.recv(torch.empty(0), 1)
    binomial(comm, tensor)


@fault("tree_all_reduce", "right sum, but rank 0 called the library's tree_broadcast")
def half_from_the_library(comm, tensor):
    collectives.reduce(comm, tensor, 0)
    collectives.broadcast(comm, tensor, 0)


@fault("tree_all_reduce", "right sum, but rank 0 called torch's barrier")
def with_a_barrier(comm, tensor):
    binomial(comm, tensor)
    comm.barrier()


@fault("tree_all_reduce", "right sum, but the ranks do not end with the same bits", "(3 ranks, 11 float32)")
def rounds_at_home(comm, tensor):
    """Right messages, but every rank but 0 makes its own rounding."""
    binomial(comm, tensor)
    if tensor.is_floating_point() and comm.rank == 1 and comm.world_size == 3:
        tensor.copy_(tensor / 3 * 3 + 0)
        tensor *= 1 + torch.finfo(tensor.dtype).eps if tensor.numel() == 11 else 1


# --- ping-pong


@right("ping_pong")
def bounce(comm, tensor, num_rounds):
    other = 1 - comm.rank
    if comm.world_size == 1 or other < 0:
        return
    for turn in range(2 * num_rounds):
        if turn % 2 == comm.rank:
            comm.send(tensor, other)
        else:
            comm.recv(tensor, other)
            if comm.rank == 1:
                tensor.add_(1)


@fault(
    "ping_pong",
    "rank 0 raised ValueError at `comm.send(tensor, 1)`: send(to): expected a rank of this communicator",
    "(1 rank,",
)
def needs_two_ranks(comm, tensor, num_rounds):
    for _ in range(num_rounds):
        if comm.rank == 0:
            comm.send(tensor, 1)
            comm.recv(tensor, 1)
        elif comm.rank == 1:
            comm.recv(tensor, 0)
            tensor += 1
            comm.send(tensor, 0)


@fault("ping_pong", "it does not end", "rank 2", "(3 ranks,", timeout=1.5)
def everyone_plays(comm, tensor, num_rounds):
    for _ in range(num_rounds if comm.world_size > 1 else 0):
        if comm.rank == 0:
            comm.send(tensor, 1)
            comm.recv(tensor, 1)
        else:
            comm.recv(tensor, 0)
            tensor += 1
            comm.send(tensor, 0)


@fault("ping_pong", "wrong values: rank 0 ended with 101 at position 0, where 103 is right", "num_rounds=3")
def once_only(comm, tensor, num_rounds):
    bounce(comm, tensor, 1)


@fault("ping_pong", "wrong values: rank 0 ended with 100 at position 0, where 101 is right")
def forgets_to_add(comm, tensor, num_rounds):
    for _ in range(num_rounds if comm.world_size > 1 else 0):
        if comm.rank == 0:
            comm.send(tensor, 1)
            comm.recv(tensor, 1)
        elif comm.rank == 1:
            comm.recv(tensor, 0)
            comm.send(tensor, 0)


@fault("ping_pong", "wrong values: rank 1 ended with 200 at position 0, where 101 is right")
def receives_elsewhere(comm, tensor, num_rounds):
    box = tensor.clone()
    bounce(comm, box, num_rounds)
    if comm.rank == 0:
        tensor.copy_(box)


@fault(
    "ping_pong",
    "it does not end: rank 0 waits in send of 48 bytes to rank 1 and rank 1 waits in send",
    timeout=1.5,
)
def both_serve(comm, tensor, num_rounds):
    if comm.rank < 2 <= comm.world_size:
        for _ in range(num_rounds):
            comm.send(tensor, 1 - comm.rank)
            comm.recv(tensor, 1 - comm.rank)


@fault(
    "ping_pong",
    "right values, but each rank sent 12 messages where a ping-pong sends num_rounds = 1 (2 ranks, 12 float32",
)
def element_by_element(comm, tensor, num_rounds):
    if tensor.dim() == 0:
        return bounce(comm, tensor, num_rounds)
    for element in tensor:
        bounce(comm, element, num_rounds)
    return None


@fault("ping_pong", "right values, but rank 0 sent 0 bytes where 48 bytes should be (2 ranks")
def knows_the_end(comm, tensor, num_rounds):
    """No ball: rank 0 adds up at home, and only rank 1 hears of it at the end."""
    if comm.world_size == 1:
        return
    if comm.rank == 0:
        comm.recv(tensor, 1)
    elif comm.rank == 1:
        tensor.copy_(tensor - 100 + num_rounds)
        comm.send(tensor, 0)


# --- pass it on


@right("pass_it_on")
def passed_to_the_left(comm, mine):
    N, r = comm.world_size, comm.rank
    numbers = torch.empty(N, dtype=mine.dtype)
    numbers[r : r + 1] = mine
    for step in range(N - 1):
        at, come = (r + step) % N, (r + step + 1) % N
        comm.exchange(numbers[at : at + 1], (r - 1) % N, numbers[come : come + 1], (r + 1) % N)
    return numbers


@fault("pass_it_on", "wrong numbers: rank 0 ended with", "in the wrong place", "(2 ranks, 1 float32)")
def in_order_of_arrival(comm, mine):
    N, numbers, passing = comm.world_size, [], mine
    for _ in range(N - 1):
        came = torch.empty_like(passing)
        comm.exchange(passing, (comm.rank + 1) % N, came, (comm.rank - 1) % N)
        numbers.append(came.item())
        passing = came
    return [*numbers, mine.item()]


@fault("pass_it_on", "wrong numbers", "(3 ranks, 1 float32)")
def always_its_own(comm, mine):
    """Hands on its own number again and again."""
    N, r = comm.world_size, comm.rank
    numbers = [mine.item()] * N
    for step in range(1, N):
        came = torch.empty_like(mine)
        comm.exchange(mine, (r + 1) % N, came, (r - 1) % N)
        numbers[(r - step) % N] = came.item()
    return numbers


@fault("pass_it_on", "rank 0 returned None; expected a list of 1 number, one of each rank (1 rank")
def returns_nothing(comm, mine):
    passed_to_the_left(comm, mine)


@fault("pass_it_on", "rank 0 returned a dict of 1; expected a list")
def returns_a_dict(comm, mine):
    return dict(enumerate(passed_to_the_left(comm, mine)))


@fault("pass_it_on", "right numbers, but rank 0 sent to rank 1 and rank 2; in a ring")
def tells_everybody(comm, mine):
    N, r = comm.world_size, comm.rank
    numbers = [mine.item()] * N
    for d in range(1, N):
        came = torch.empty_like(mine)
        comm.exchange(mine, (r + d) % N, came, (r - d) % N)
        numbers[(r - d) % N] = came.item()
    return numbers


@fault("pass_it_on", "right numbers, but rank 0 called torch's all_gather")
def gathers(comm, mine):
    out = torch.empty(comm.world_size, dtype=mine.dtype)
    comm.all_gather(out, mine)
    return out


@fault(
    "pass_it_on",
    "right numbers, but each rank sent 8 bytes = 2*S where a ring sends N-1 numbers = 4 (2 ranks, 1 float32)",
)
def passes_the_whole_list(comm, mine):
    N, r = comm.world_size, comm.rank
    numbers = torch.zeros(N, dtype=mine.dtype)
    numbers[r] = mine[0]
    for _ in range(N - 1):
        came = torch.empty_like(numbers)
        comm.exchange(numbers, (r + 1) % N, came, (r - 1) % N)
        numbers = torch.where(numbers == 0, came, numbers)
    return numbers


@fault(
    "pass_it_on",
    "right numbers, but each rank sent 2 messages where a ring sends N-1 = 1 (2 ranks, 1 float32)",
)
def says_it_twice(comm, mine):
    N, r = comm.world_size, comm.rank
    if N > 1:
        comm.exchange(torch.empty(0), (r - 1) % N, torch.empty(0), (r + 1) % N)
    return passed_to_the_left(comm, mine)


@fault("pass_it_on", "rank 0 sends 8 bytes to rank 1, which has room for 4", "(2 ranks, 1 int64)")
def box_of_float32(comm, mine):
    N, r = comm.world_size, comm.rank
    numbers, passing = [mine.item()] * N, mine
    for step in range(1, N):
        came = torch.empty(1)
        comm.exchange(passing, (r + 1) % N, came, (r - 1) % N)
        numbers[(r - step) % N] = came.item()
        passing = came
    return numbers


# --- the tests


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name):
    verdict = check(name, EXERCISES[name].solution)
    assert verdict.passed and verdict.attempted, verdict
    assert verdict.details == () and repr(verdict).startswith(f"passed: the right {EXERCISES[name].noun}")


@pytest.mark.parametrize("name, fn", PLANTED.right_cases())
def test_another_right_answer_passes(name, fn):
    verdict = check(name, fn)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name, fn, said, options", PLANTED.wrong_cases())
def test_a_wrong_answer_is_caught(name, fn, said, options):
    verdict = PLANTED.caught(name, fn, said, options)
    ranks = [line.split(":")[0] for line in verdict.details]
    assert ranks == [f"rank {rank}" for rank in range(len(ranks))]
    assert ranks or verdict.text.startswith("your function takes")


def test_every_grader_meets_at_least_six_wrong_answers():
    counts = {name: len(rows) for name, rows in PLANTED.faults.items()}
    assert min(counts.values()) >= 6, counts


def test_what_the_graders_said(note):
    """Not a test of its own: prints the table at the end of the run."""
    note(PLANTED.table())
