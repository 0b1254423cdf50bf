"""Which gradients travel together.

An all-reduce costs a fixed time α beside the time for its bytes, so many small ones are slow; one large one cannot
begin before the last gradient is there, so nothing of it hides behind backward. Buckets are the middle: gradients that
become ready one after the other fill a bucket, and a full bucket leaves.

The rule is PyTorch's (S. Li and others, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020, section 4.2): a small first bucket, so that the first message leaves early; larger ones after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def assign_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], caps_bytes: Sequence[int]
) -> list[list[int]]:
    """The items 0, 1, 2, … in buckets, each bucket full when it holds its cap or more.

    sizes_bytes: of the items, in the order in which they become ready.
    kinds: what must not be mixed in one bucket: the dtype.
    caps_bytes: of each kind's first, second, … bucket; the last one counts for all that follow.

    An item is never cut, so a bucket may be larger than its cap. Buckets come in the order of their first items.

    >>> assign_buckets([4, 4, 4, 4, 4], ["float32"] * 5, [4, 8])
    [[0], [1, 2], [3, 4]]
    """
    if not caps_bytes or min(caps_bytes) < 1:
        raise ValueError(f"caps_bytes: expected sizes of 1 byte or more, got {list(caps_bytes)}")
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    closed: dict[Hashable, int] = {}  # how many buckets of the kind are full
    for item, (_, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        bucket = filling.setdefault(kind, [])
        bucket.append(item)
        cap = caps_bytes[min(closed.get(kind, 0), len(caps_bytes) - 1)]
        if sum(sizes_bytes[i] for i in bucket) >= cap:
            full.append(filling.pop(kind))
            closed[kind] = closed.get(kind, 0) + 1
    return sorted([*full, *filling.values()])
