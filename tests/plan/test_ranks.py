"""The rank variables: literal tables, and what is refused. (Held against a real torchrun: tests/classroom.)"""

from __future__ import annotations

import pytest

from course_lib.plan.ranks import RANK_VARIABLES, worker_ranks

TABLE = {  # nodes of 2 + 1 workers
    (0, 0): (0, 0, 0, 0, 2, 3, 2, 3),
    (0, 1): (1, 1, 0, 1, 2, 3, 2, 3),
    (1, 0): (2, 0, 1, 2, 1, 3, 2, 3),
}


@pytest.mark.parametrize("worker", TABLE)
def test_two_nodes_of_two_and_one_worker(worker):
    expected = dict(zip(RANK_VARIABLES, TABLE[worker], strict=True))
    assert worker_ranks([2, 1], *worker) == expected
    assert tuple(worker_ranks([2, 1], *worker)) == RANK_VARIABLES


@pytest.mark.parametrize("nodes", [[1], [4], [4, 4, 4], [1, 3, 2, 5]])
def test_ranks_count_through_node_by_node(nodes):
    workers = [worker_ranks(nodes, node, local) for node, n in enumerate(nodes) for local in range(n)]
    assert [one["RANK"] for one in workers] == list(range(sum(nodes)))
    assert {one["WORLD_SIZE"] for one in workers} == {sum(nodes)}
    assert all(one["ROLE_RANK"] == one["RANK"] for one in workers)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (([], 0, 0), "nproc_per_node: expected 1 worker or more"),
        (([2, 0], 0, 0), "nproc_per_node: expected 1 worker or more"),
        (([2, 1], 2, 0), "node: expected 0 to 1"),
        (([2, 1], -1, 0), "node: expected 0 to 1"),
        (([2, 1], 1, 1), "local_rank: expected 0 to 0, as node 1 has 1, got 1"),
        (([2, 1], 0, -1), "local_rank: expected 0 to 1"),
    ],
)
def test_a_worker_that_is_not_there_is_refused(arguments, said):
    with pytest.raises(ValueError) as raised:
        worker_ranks(*arguments)
    assert str(raised.value).startswith(said)
