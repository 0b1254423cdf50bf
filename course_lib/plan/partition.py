"""Cutting `length` things into `n` parts that differ by one at most.

Nearly nothing in training divides evenly: 57 elements over 4 ranks, a bias of 3, a batch of 5. Everything in
this course cuts in the same way, so that any two modules agree on who owns what: the first `length % n` parts
are one longer. Parts may be empty.
"""

from __future__ import annotations


def chunk_sizes(length: int, n: int) -> list[int]:
    """The lengths of the `n` parts. They add up to `length`.

    >>> chunk_sizes(10, 4)
    [3, 3, 2, 2]
    """
    if length < 0:
        raise ValueError(f"length: expected 0 or more, got {length}")
    if n < 1:
        raise ValueError(f"n: expected 1 part or more, got {n}")
    size, longer = divmod(length, n)
    return [size + 1] * longer + [size] * (n - longer)


def chunk_bounds(length: int, n: int) -> list[tuple[int, int]]:
    """Where each part begins and ends: part i is `[start:stop]`.

    >>> chunk_bounds(10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    bounds, start = [], 0
    for size in chunk_sizes(length, n):
        bounds.append((start, start + size))
        start += size
    return bounds
