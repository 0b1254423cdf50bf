"""What each rank sends and receives in a collective: bytes and messages, exactly.

    N    world_size, number of ranks; r is one of them
    n    length, number of elements in the *whole* tensor (never a rank's piece)
    S    n * itemsize, its bytes
    c_i  bytes of chunk i, when the tensor is cut into N chunks that differ by one element at most
         (`partition`)
    m    segments in which a reduce-scatter sends a chunk, so that adding one overlaps the transfer of the next

Every function takes `(world_size, length, itemsize)` and returns a list with one entry for each rank. The
`_bytes` functions return `Bytes(sent, received)`; the `_messages` functions count the messages a rank sends.
An empty message (of an empty chunk) is a message.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
2005 (trees, rings); R. Rabenseifner, "Optimization of Collective Reduction Operations", 2004 (all-reduce as
reduce-scatter and all-gather); P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", 2009 (the ring, and the proof that no algorithm sends fewer than 2(N-1)/N·S bytes).
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.plan.partition import chunk_sizes

SEGMENT_BYTES = 4 << 20  # measured: below 2 MiB the messages themselves cost more than the overlap gains


class Bytes(NamedTuple):
    """What one rank sends and receives."""

    sent: int
    received: int


def reduce_bytes(world_size: int, length: int, itemsize: int = 4, root: int = 0) -> list[Bytes]:
    """Along a tree to `root`: each rank receives S from each of its children and sends S to its parent."""
    size = _checked(world_size, length, itemsize, root) * itemsize
    children = _num_children(world_size, root)
    return [Bytes(size * (r != root), size * children[r]) for r in range(world_size)]


def reduce_messages(world_size: int, length: int = 0, itemsize: int = 4, root: int = 0) -> list[int]:
    _checked(world_size, length, itemsize, root)
    return [int(r != root) for r in range(world_size)]


def broadcast_bytes(world_size: int, length: int, itemsize: int = 4, root: int = 0) -> list[Bytes]:
    """Along the same tree from `root`: the reduce backwards."""
    return [Bytes(received, sent) for sent, received in reduce_bytes(world_size, length, itemsize, root)]


def broadcast_messages(world_size: int, length: int = 0, itemsize: int = 4, root: int = 0) -> list[int]:
    _checked(world_size, length, itemsize, root)
    return _num_children(world_size, root)


def chain_broadcast_bytes(world_size: int, length: int, itemsize: int = 4, root: int = 0) -> list[Bytes]:
    """Along a chain root, root+1, …: all but the last pass S on. What a bandwidth-optimal broadcast moves."""
    size = _checked(world_size, length, itemsize, root) * itemsize
    last = (root - 1) % world_size
    return [Bytes(size * (r != last), size * (r != root)) for r in range(world_size)]


def chain_broadcast_messages(world_size: int, length: int = 0, itemsize: int = 4, root: int = 0) -> list[int]:
    _checked(world_size, length, itemsize, root)
    return [int(r != (root - 1) % world_size) for r in range(world_size)]


def naive_all_reduce_bytes(world_size: int, length: int, itemsize: int = 4) -> list[Bytes]:
    """Everybody sends S to rank 0 and gets S back: (N-1)·S through rank 0's link, each way."""
    size = _checked(world_size, length, itemsize) * itemsize
    return [Bytes(m * size, m * size) for m in naive_all_reduce_messages(world_size)]


def naive_all_reduce_messages(world_size: int, length: int = 0, itemsize: int = 4) -> list[int]:
    _checked(world_size, length, itemsize)
    return [world_size - 1 if r == 0 else 1 for r in range(world_size)]


def tree_all_reduce_bytes(world_size: int, length: int, itemsize: int = 4) -> list[Bytes]:
    """A reduce and a broadcast along the same tree: S with the parent and S with each child, both ways."""
    return _sum_bytes(
        reduce_bytes(world_size, length, itemsize), broadcast_bytes(world_size, length, itemsize)
    )


def tree_all_reduce_messages(world_size: int, length: int = 0, itemsize: int = 4) -> list[int]:
    sizes = (world_size, length, itemsize)
    return _sum(reduce_messages(*sizes), broadcast_messages(*sizes))


def ring_reduce_scatter_bytes(world_size: int, length: int, itemsize: int = 4) -> list[Bytes]:
    """Rank r sends all chunks but its own, S - c_r, and receives all but its left one's, S - c_(r-1)."""
    chunks = [size * itemsize for size in chunk_sizes(_checked(world_size, length, itemsize), world_size)]
    whole = sum(chunks)
    return [Bytes(whole - chunks[r], whole - chunks[r - 1]) for r in range(world_size)]


def ring_all_gather_bytes(world_size: int, length: int, itemsize: int = 4) -> list[Bytes]:
    """Rank r sends all chunks but its right one's, S - c_(r+1), and receives all but its own, S - c_r."""
    chunks = [size * itemsize for size in chunk_sizes(_checked(world_size, length, itemsize), world_size)]
    whole = sum(chunks)
    return [Bytes(whole - chunks[(r + 1) % world_size], whole - chunks[r]) for r in range(world_size)]


def ring_all_reduce_bytes(world_size: int, length: int, itemsize: int = 4) -> list[Bytes]:
    """A reduce-scatter and an all-gather: 2(N-1)/N·S each way when n divides by N."""
    sizes = (world_size, length, itemsize)
    return _sum_bytes(ring_reduce_scatter_bytes(*sizes), ring_all_gather_bytes(*sizes))


def num_segments(chunk_length: int, itemsize: int = 4, segment_bytes: int = SEGMENT_BYTES) -> int:
    """m: segments of `segment_bytes` at most in a chunk of this length, which is the longest; at least 1."""
    return max(1, -(-chunk_length // max(1, segment_bytes // itemsize)))


def ring_reduce_scatter_messages(
    world_size: int, length: int = 0, itemsize: int = 4, segment_bytes: int = SEGMENT_BYTES
) -> list[int]:
    """N-1 steps of m messages."""
    longest = chunk_sizes(_checked(world_size, length, itemsize), world_size)[0]
    return [(world_size - 1) * num_segments(longest, itemsize, segment_bytes)] * world_size


def ring_all_gather_messages(world_size: int, length: int = 0, itemsize: int = 4) -> list[int]:
    """N-1 steps of one message: nothing is added, so there is nothing to overlap."""
    _checked(world_size, length, itemsize)
    return [world_size - 1] * world_size


def ring_all_reduce_messages(
    world_size: int, length: int = 0, itemsize: int = 4, segment_bytes: int = SEGMENT_BYTES
) -> list[int]:
    """(N-1)·(m+1): 2(N-1) unless a chunk is longer than `segment_bytes`."""
    return _sum(
        ring_reduce_scatter_messages(world_size, length, itemsize, segment_bytes),
        ring_all_gather_messages(world_size, length, itemsize),
    )


def hierarchical_all_reduce_bytes(
    world_size: int, length: int, itemsize: int = 4, ranks_per_host: int = 1
) -> list[Bytes]:
    """L ranks on each of H hosts: reduce-scatter inside, all-reduce of chunk c_l across, all-gather inside.

    Between hosts each rank sends 2(H-1)/H·c_l, so a host sends 2(H-1)/H·S in all: what one rank of a flat
    ring sends.
    """
    hosts, chunks = _hosts(world_size, length, itemsize, ranks_per_host)
    inside = ring_all_reduce_bytes(
        ranks_per_host, length, itemsize
    )  # its two halves, with the step across between
    across = [ring_all_reduce_bytes(hosts, chunk, itemsize) for chunk in chunks]
    places = [divmod(r, ranks_per_host) for r in range(world_size)]
    return _sum_bytes([inside[local] for _, local in places], [across[local][host] for host, local in places])


def hierarchical_all_reduce_messages(
    world_size: int,
    length: int = 0,
    itemsize: int = 4,
    ranks_per_host: int = 1,
    segment_bytes: int = SEGMENT_BYTES,
) -> list[int]:
    """2(L-1) steps inside and 2(H-1) across, as in the rings they are."""
    hosts, chunks = _hosts(world_size, length, itemsize, ranks_per_host)
    inside = ring_all_reduce_messages(ranks_per_host, length, itemsize, segment_bytes)
    across = [ring_all_reduce_messages(hosts, chunk, itemsize, segment_bytes) for chunk in chunks]
    places = [divmod(r, ranks_per_host) for r in range(world_size)]
    return [inside[local] + across[local][host] for host, local in places]


def _hosts(world_size: int, length: int, itemsize: int, ranks_per_host: int) -> tuple[int, list[int]]:
    _checked(world_size, length, itemsize)
    if ranks_per_host < 1 or world_size % ranks_per_host:
        raise ValueError(f"ranks_per_host: expected a divisor of {world_size}, got {ranks_per_host}")
    return world_size // ranks_per_host, chunk_sizes(length, ranks_per_host)


def _num_children(world_size: int, root: int) -> list[int]:
    """Children of each rank. Place p has the places p+1, p+2, p+4, … while these bits of p are 0."""
    children = [0] * world_size
    for place in range(world_size):
        distance = 1
        while place & distance == 0 and place + distance < world_size:
            children[(root + place) % world_size] += 1
            distance *= 2
    return children


def _sum(*parts: list[int]) -> list[int]:
    return [sum(of_rank) for of_rank in zip(*parts, strict=True)]


def _sum_bytes(*parts: list[Bytes]) -> list[Bytes]:
    return [Bytes(*map(sum, zip(*of_rank, strict=True))) for of_rank in zip(*parts, strict=True)]


def _checked(world_size: int, length: int, itemsize: int, root: int = 0) -> int:
    """`length`, if all the numbers make sense."""
    for name, value, least in [
        ("world_size", world_size, 1),
        ("length", length, 0),
        ("itemsize", itemsize, 1),
    ]:
        if value < least:
            raise ValueError(f"{name}: expected {least} or more, got {value}")
    if not 0 <= root < world_size:
        raise ValueError(f"root: expected a rank of 0…{world_size - 1}, got {root}")
    return length
