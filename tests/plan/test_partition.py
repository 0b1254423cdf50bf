"""Uneven parts: the table everything else is cut by."""

from __future__ import annotations

import pytest

from course_lib.plan.partition import chunk_bounds, chunk_sizes


@pytest.mark.parametrize(
    ("length", "n", "sizes"),
    [
        (12, 4, [3, 3, 3, 3]),
        (10, 4, [3, 3, 2, 2]),
        (57, 4, [15, 14, 14, 14]),
        (3, 4, [1, 1, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
        (0, 3, [0, 0, 0]),
        (1857, 1, [1857]),
    ],
)
def test_sizes(length: int, n: int, sizes: list[int]) -> None:
    assert chunk_sizes(length, n) == sizes


def test_bounds_of_an_uneven_cut() -> None:
    assert chunk_bounds(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert chunk_bounds(1, 3) == [(0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("length", range(20))
def test_parts_cover_everything_once_and_differ_by_one_at_most(length: int, n: int) -> None:
    parts = [list(range(length))[start:stop] for start, stop in chunk_bounds(length, n)]
    assert [item for part in parts for item in part] == list(range(length))
    assert [len(part) for part in parts] == chunk_sizes(length, n)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("length", "n", "named"), [(-1, 2, "length"), (4, 0, "n: "), (4, -1, "n: ")])
def test_refused(length: int, n: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        chunk_sizes(length, n)
    with pytest.raises(ValueError, match=named):
        chunk_bounds(length, n)
