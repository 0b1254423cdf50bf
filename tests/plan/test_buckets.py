"""Buckets: a table by hand, and PyTorch's own rule."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from course_lib.plan.buckets import assign_buckets


@pytest.mark.parametrize(
    ("sizes", "kinds", "caps", "buckets"),
    [
        ([], "", [1], []),
        ([4, 4, 4], "aaa", [100], [[0, 1, 2]]),
        ([4, 4, 4, 4, 4], "aaaaa", [4, 8], [[0], [1, 2], [3, 4]]),
        ([4, 4, 4], "aaa", [1], [[0], [1], [2]]),  # larger than its cap: a bucket of its own
        ([3, 9, 1, 1], "aaaa", [8], [[0, 1], [2, 3]]),
        ([4, 2, 4, 2], "abab", [8], [[0, 2], [1, 3]]),  # dtypes do not mix
        ([4, 2, 4, 2], "abab", [4], [[0], [1, 3], [2]]),
    ],
)
def test_by_hand(sizes: list[int], kinds: str, caps: list[int], buckets: list[list[int]]) -> None:
    assert assign_buckets(sizes, kinds, caps) == buckets


def test_equals_torchs_rule() -> None:
    draw = random.Random(0)
    for _ in range(50):
        dtypes = draw.choices([torch.float32, torch.float64], k=draw.randint(1, 20))
        tensors = [torch.empty(draw.randint(1, 300), dtype=dtype) for dtype in dtypes]
        caps = [draw.randint(1, 2000) for _ in range(draw.randint(1, 3))]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps)
        assert assign_buckets([t.nbytes for t in tensors], dtypes, caps) == theirs


@pytest.mark.parametrize("caps", [[], [0], [5, -1]])
def test_caps_that_make_no_sense(caps: list[int]) -> None:
    with pytest.raises(ValueError, match="caps_bytes: expected sizes of 1 byte or more"):
        assign_buckets([1], ["a"], caps)
