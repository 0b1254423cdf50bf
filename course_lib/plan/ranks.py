"""Who is who in a torchrun job: the rank variables of a worker, computed from nothing but the workers on each node.

torchrun numbers the workers node by node: first all of node 0, then all of node 1, and so on. So a worker's RANK is the
number of workers on the nodes before its own, plus its LOCAL_RANK. That is node * nproc + local_rank only where all
nodes have equally many.

The node numbers are those that the rendezvous gives (GROUP_RANK). With static ones they are `--node-rank`; with c10d
they are given in the order in which the nodes come, and may be others after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
)


def worker_ranks(nproc_per_node: Sequence[int], node: int, local_rank: int) -> dict[str, int]:
    """What torchrun writes into the environment of worker `local_rank` on `node`; there as text, here as numbers.

    nproc_per_node: workers on each node. All have the same role, as they do unless nodes are started with other --role.
    Raises ValueError for a worker that there is not.

    >>> worker_ranks([2, 1], node=1, local_rank=0)["RANK"]
    2
    """
    _check(nproc_per_node, node, local_rank)
    before, world_size = sum(nproc_per_node[:node]), sum(nproc_per_node)
    return {
        "RANK": before + local_rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
        "ROLE_RANK": before + local_rank,  # the same as RANK with one role
        "LOCAL_WORLD_SIZE": nproc_per_node[node],
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": len(nproc_per_node),
        "ROLE_WORLD_SIZE": world_size,
    }


def _check(nproc_per_node: Sequence[int], node: int, local_rank: int) -> None:
    if not nproc_per_node or min(nproc_per_node) < 1:
        raise ValueError(
            f"nproc_per_node: expected 1 worker or more on each of 1 node or more, got {list(nproc_per_node)}"
        )
    if not 0 <= node < len(nproc_per_node):
        raise ValueError(
            f"node: expected 0 to {len(nproc_per_node) - 1}, a node of {list(nproc_per_node)}, got {node}"
        )
    if not 0 <= local_rank < nproc_per_node[node]:
        raise ValueError(
            f"local_rank: expected 0 to {nproc_per_node[node] - 1}, as node {node} has {nproc_per_node[node]}, "
            f"got {local_rank}"
        )
