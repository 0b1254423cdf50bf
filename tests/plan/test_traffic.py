"""Bytes and messages on paper: small tables worked out by hand, and laws that hold for all sizes."""

from __future__ import annotations

import inspect

import pytest

from course_lib.plan import traffic
from course_lib.plan.traffic import Bytes

ALL_REDUCES = ["naive", "tree", "ring"]
COUNTS = [name for name in dir(traffic) if name.endswith(("_bytes", "_messages")) and name[0] != "_"]


def test_naive_by_hand() -> None:  # 3 ranks, 5 elements of 4 bytes
    assert traffic.naive_all_reduce_bytes(3, 5) == [(40, 40), (20, 20), (20, 20)]
    assert traffic.naive_all_reduce_messages(3) == [2, 1, 1]


def test_tree_by_hand() -> None:  # 0 ← 1, 2 ← 3, 0 ← 2, and back
    assert traffic.reduce_bytes(4, 5) == [(0, 40), (20, 0), (20, 20), (20, 0)]
    assert traffic.broadcast_bytes(4, 5) == [(40, 0), (0, 20), (20, 20), (0, 20)]
    assert traffic.tree_all_reduce_bytes(4, 5) == [(40, 40), (20, 20), (40, 40), (20, 20)]
    assert traffic.reduce_messages(4) == [0, 1, 1, 1]
    assert traffic.broadcast_messages(4) == [2, 0, 1, 0]
    assert traffic.tree_all_reduce_messages(4) == [2, 1, 2, 1]


def test_tree_with_another_root_is_turned() -> None:
    assert traffic.reduce_bytes(4, 5, root=1) == [(20, 0), (0, 40), (20, 0), (20, 20)]
    assert traffic.broadcast_messages(5, root=3) == [1, 0, 0, 3, 0]


def test_ring_by_hand_when_nothing_divides() -> None:
    # 10 float32 over 4 ranks: chunks of 12, 12, 8, 8 bytes of 40.
    assert traffic.ring_reduce_scatter_bytes(4, 10) == [(28, 32), (28, 28), (32, 28), (32, 32)]
    assert traffic.ring_all_gather_bytes(4, 10) == [(28, 28), (32, 28), (32, 32), (28, 32)]
    assert traffic.ring_all_reduce_bytes(4, 10) == [(56, 60), (60, 56), (64, 60), (60, 64)]
    assert traffic.ring_all_reduce_messages(4, 10) == [6, 6, 6, 6]


@pytest.mark.parametrize("length", [1, 2])
def test_a_ring_with_fewer_elements_than_ranks_still_takes_all_its_steps(length: int) -> None:
    assert traffic.ring_all_reduce_messages(4, length) == [6] * 4
    assert sum(rank.sent for rank in traffic.ring_all_reduce_bytes(4, length)) == 2 * 3 * length * 4
    assert traffic.ring_all_reduce_bytes(4, 1)[0] == Bytes(sent=4, received=4)


def test_hierarchical_by_hand() -> None:
    # 2 hosts of 2 ranks, 8 float32. Inside: 2 ranks, 32 bytes, so 32 each way. Across: 16 bytes over 2 ranks, so 16.
    assert traffic.hierarchical_all_reduce_bytes(4, 8, ranks_per_host=2) == [(48, 48)] * 4
    assert traffic.hierarchical_all_reduce_messages(4, 8, ranks_per_host=2) == [4] * 4


@pytest.mark.parametrize("length", [0, 1, 7, 57, 1024])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_one_host_or_one_rank_per_host_is_a_flat_ring(n: int, length: int) -> None:
    flat = traffic.ring_all_reduce_bytes(n, length), traffic.ring_all_reduce_messages(n, length)
    for per_host in (1, n):
        sizes = (n, length, 4, per_host)
        assert traffic.hierarchical_all_reduce_bytes(*sizes) == flat[0]
        assert traffic.hierarchical_all_reduce_messages(*sizes) == flat[1]


def test_chain() -> None:
    assert traffic.chain_broadcast_bytes(3, 5, root=1) == [(0, 20), (20, 0), (20, 20)]
    assert traffic.chain_broadcast_messages(3, root=1) == [0, 1, 1]


@pytest.mark.parametrize("name", [name for name in COUNTS if name.endswith("_bytes")])
def test_what_is_sent_is_received(name: str) -> None:
    for n in range(1, 10):
        for length in (0, 1, 5, 57):
            ranks = getattr(traffic, name)(n, length, 8)
            assert len(ranks) == n and sum(r.sent for r in ranks) == sum(r.received for r in ranks)
            if n == 1:
                assert ranks == [(0, 0)]


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_no_all_reduce_sends_less_in_all_than_each_value_must_travel(name: str) -> None:
    for n in range(1, 10):
        total = sum(rank.sent for rank in getattr(traffic, f"{name}_all_reduce_bytes")(n, 57))
        assert total == 2 * (n - 1) * 57 * 4  # the same total for all three: only the balance differs


@pytest.mark.parametrize("n", range(2, 10))
def test_ring_sends_2_n_minus_1_over_n(n: int) -> None:
    for sent, received in traffic.ring_all_reduce_bytes(n, 12 * n):
        assert sent == received == 2 * (n - 1) * 12 * 4


@pytest.mark.parametrize(
    ("chunk_length", "itemsize", "segment_bytes", "segments"),
    [(0, 4, 1 << 20, 1), (1, 4, 1 << 20, 1), (8, 4, 32, 1), (9, 4, 32, 2), (64, 4, 32, 8), (5, 8, 4, 5)],
)
def test_segments(chunk_length: int, itemsize: int, segment_bytes: int, segments: int) -> None:
    assert traffic.num_segments(chunk_length, itemsize, segment_bytes) == segments


def test_segments_multiply_the_messages_of_a_reduce_scatter_and_nothing_else() -> None:
    # 41 elements over 4 ranks: the longest chunk has 11, in segments of 4, 4 and 3.
    assert traffic.ring_reduce_scatter_messages(4, 41, segment_bytes=16) == [3 * 3] * 4
    assert traffic.ring_all_gather_messages(4, 41) == [3] * 4
    assert traffic.ring_all_reduce_messages(4, 41, segment_bytes=16) == [3 * 3 + 3] * 4
    assert "segment_bytes" not in inspect.signature(traffic.ring_all_reduce_bytes).parameters


@pytest.mark.parametrize("name", COUNTS)
def test_bad_arguments_are_named(name: str) -> None:
    count = getattr(traffic, name)
    for arguments, named in [((0, 4), "world_size"), ((2, -1), "length"), ((2, 4, 0), "itemsize")]:
        with pytest.raises(ValueError, match=named):
            count(*arguments)
    if "root" in inspect.signature(count).parameters:
        with pytest.raises(ValueError, match="root"):
            count(3, 4, root=3)


def test_hosts_must_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"ranks_per_host.*divisor of 6"):
        traffic.hierarchical_all_reduce_bytes(6, 4, ranks_per_host=4)
