"""The replay against a real run, against the arithmetic, and against ledgers that are no ring."""

from dataclasses import replace

import pytest
import torch

from course_lib import launch
from course_lib.classroom.replay import ALL_GATHER, REDUCE_SCATTER, NotARing, label, replay_ring
from course_lib.comm.collectives import ring_all_reduce, tree_all_reduce
from course_lib.comm.ledger import Ledger, Row
from course_lib.plan.partition import chunk_sizes
from course_lib.plan.traffic import ring_all_reduce_bytes


def ring_ledgers(chunk_bytes: list[int]) -> list[Ledger]:
    """What a ring's ranks write, by hand: the convention of the module's docstring, spelled out a second time."""
    size = len(chunk_bytes)
    ledgers = []
    for rank in range(size):
        sends = [(rank - 1 - step) % size for step in range(size - 1)] + [
            (rank - step) % size for step in range(size - 1)
        ]
        rows = [(chunk_bytes[chunk], chunk_bytes[(chunk - 1) % size]) for chunk in sends]
        ledgers.append(Ledger([Row("exchange", (rank + 1) % size, s, r, 1, 0.0, 0.0) for s, r in rows]))
    return ledgers


def _ring(comm, length):
    ring_all_reduce(comm, torch.arange(length, dtype=torch.float32) + comm.rank)
    comm.barrier()


def _tree(comm, length):
    tree_all_reduce(comm, torch.ones(length))


def _whole_tensor_ring(comm, length):
    total, passed = torch.ones(length), torch.ones(length)
    for _ in range(2 * (comm.world_size - 1)):
        came = torch.empty(length)
        comm.exchange(passed, (comm.rank + 1) % comm.world_size, came, (comm.rank - 1) % comm.world_size)
        total, passed = total + came, came


@pytest.mark.parametrize(("size", "length"), [(4, 11), (3, 7), (2, 5), (4, 2)])
def test_a_real_ring_is_replayed(size: int, length: int):
    results = launch(_ring, length, world_size=size, show="none")
    replay = replay_ring(results.ledger, [4 * chunk for chunk in chunk_sizes(length, size)])
    assert len(replay.steps) == 1 + 2 * (size - 1) and replay.num_ranks == size
    assert list(replay.bytes_sent) == [ledger.bytes_sent for ledger in results.ledger]
    assert list(replay.bytes_sent) == [sent for sent, _ in ring_all_reduce_bytes(size, length)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_the_phases_do_what_they_promise(size: int):
    replay = replay_ring(ring_ledgers([8] * size), [8] * size)
    everybody = frozenset(range(size))
    assert replay.steps[0].held == tuple((frozenset({rank}),) * size for rank in range(size))
    assert [step.phase for step in replay.steps[1:]] == [REDUCE_SCATTER] * (size - 1) + [ALL_GATHER] * (
        size - 1
    )
    half = replay.steps[size - 1]
    for rank in range(size):  # after the first phase, rank r owns the sum of chunk r and of no other
        assert [replay.is_sum(size - 1, rank, chunk) for chunk in range(size)] == [
            c == rank for c in range(size)
        ]
    assert {len(half.held[rank][rank]) for rank in range(size)} == {size}
    assert all(held == everybody for chunks in replay.steps[-1].held for held in chunks)
    for step in replay.steps[1:]:  # each rank sends one chunk and receives one, all different
        assert sorted(m.source for m in step.moves) == sorted(m.to for m in step.moves) == list(range(size))
        assert len({move.chunk for move in step.moves}) == size


def test_no_value_is_added_twice():
    replay = replay_ring(ring_ledgers([4, 4, 4, 4]), [4, 4, 4, 4])
    for before, step in zip(replay.steps, replay.steps[1:], strict=False):
        if step.phase == REDUCE_SCATTER:
            for move in step.moves:
                brought, own = before.held[move.source][move.chunk], before.held[move.to][move.chunk]
                assert not brought & own and step.held[move.to][move.chunk] == brought | own


def test_the_first_steps_of_three_ranks_by_hand():
    replay = replay_ring(ring_ledgers([12, 8, 8]), [12, 8, 8])
    moves = [[(m.source, m.to, m.chunk, m.num_bytes) for m in step.moves] for step in replay.steps[1:3]]
    assert moves[0] == [(0, 1, 2, 8), (1, 2, 0, 12), (2, 0, 1, 8)]
    assert moves[1] == [(0, 1, 1, 8), (1, 2, 2, 8), (2, 0, 0, 12)]
    assert [[label(held, 3) for held in chunks] for chunks in replay.steps[1].held] == [
        ["0", "0+2", "0"],
        ["1", "1", "0+1"],
        ["1+2", "2", "2"],
    ]


def test_one_rank_has_nothing_to_send():
    replay = replay_ring([Ledger()], [40])
    assert len(replay.steps) == 1 and replay.is_sum(0, 0, 0) and replay.bytes_sent == (0,)


def test_labels():
    assert label({1}, 4) == "1" and label({3, 0}, 4) == "0+3" and label({0, 1, 2}, 4) == "0+1+2"
    assert label(range(4), 4) == "sum" and label({0, 1, 2}, 8) == "3/8" and label({0}, 1) == "0"


# --- ledgers that are refused


def test_a_ring_that_passes_whole_tensors_is_refused():
    results = launch(_whole_tensor_ring, 12, world_size=4, show="none")
    with pytest.raises(
        NotARing, match=r"step 1, chunk 3 \(12 B\) from rank 0 to rank 1: rank 0 sent 48 B: more than"
    ):
        replay_ring(results.ledger, [12] * 4)


def test_a_tree_is_refused():
    results = launch(_tree, 12, world_size=4, show="none")
    with pytest.raises(NotARing, match=r"rank 0: the ledger holds a 'recv' that moved 48 B"):
        replay_ring(results.ledger, [12] * 4)


def _changed(ledgers: list[Ledger], rank: int, index: int, **change) -> list[Ledger]:
    rows = list(ledgers[rank])
    rows[index] = replace(rows[index], **change)
    return [*ledgers[:rank], Ledger(rows), *ledgers[rank + 1 :]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peer": 0}, r"step 3, chunk 3 \(8 B\) from rank 2 to rank 3: rank 2 sent to rank 0"),
        ({"bytes_sent": 12}, r"step 3, chunk 3 .*rank 2 sent 12 B: more than the chunk"),
        ({"bytes_sent": 4}, r"step 3, chunk 3 .*rank 2 sent 4 B\."),
        ({"bytes_received": 9}, r"step 3, chunk 2 \(12 B\) from rank 1 to rank 2: rank 2 received 9 B"),
        ({"op": "all_reduce"}, r"rank 2: the ledger holds a 'all_reduce' that moved"),
    ],
)
def test_a_changed_row_is_refused(change: dict, message: str):
    ledgers = _changed(ring_ledgers([12, 12, 12, 8]), 2, 2, **change)
    with pytest.raises(NotARing, match=message):
        replay_ring(ledgers, [12, 12, 12, 8])


def test_rows_in_another_order_are_refused_when_chunks_differ():
    ledgers = ring_ledgers([16, 12, 8, 4])
    rows = list(ledgers[0])
    rows[0], rows[1] = rows[1], rows[0]
    with pytest.raises(NotARing, match=r"step 1, chunk 3 \(4 B\) from rank 0"):
        replay_ring([Ledger(rows), *ledgers[1:]], [16, 12, 8, 4])


def test_two_rings_in_one_ledger_are_refused():
    twice = [Ledger([*ledger, *ledger]) for ledger in ring_ledgers([4, 4, 4])]
    with pytest.raises(NotARing, match=r"rank 0: expected 2\(N-1\) = 4 exchanges for N = 3, found 8"):
        replay_ring(twice, [4, 4, 4])


def test_as_many_chunks_as_ranks():
    with pytest.raises(ValueError, match="N ledgers and N chunks: got 3 and 4"):
        replay_ring(ring_ledgers([4, 4, 4]), [4] * 4)
    with pytest.raises(ValueError, match="got 0 and 0"):
        replay_ring([], [])
