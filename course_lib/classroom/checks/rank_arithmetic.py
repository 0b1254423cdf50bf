"""The exercise on rank arithmetic: which variables torchrun sets for a worker, nodes with unequally many included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from course_lib.classroom.checks.runs import RunExercise, it_raised, it_returned, run
from course_lib.classroom.checks.verdict import Verdict, failed, joined
from course_lib.comm.communicator import Communicator
from course_lib.plan.ranks import RANK_VARIABLES, worker_ranks

JOBS = ([1], [4], [2, 2], [2, 1], [1, 3, 2])
OPTIONAL = ("GROUP_WORLD_SIZE",)
"""Asked for by nobody, but right is right."""


@dataclass(frozen=True)
class Worker:
    nodes: tuple[int, ...]
    node: int
    local: int

    @property
    def right(self) -> dict[str, int]:
        return worker_ranks(self.nodes, self.node, self.local)

    @property
    def before(self) -> int:
        return sum(self.nodes[: self.node])

    def __str__(self) -> str:
        return f"nproc_per_node={list(self.nodes)}, node={self.node}, local_rank={self.local}"


WORKERS = [Worker(tuple(job), node, r) for job in JOBS for node, n in enumerate(job) for r in range(n)]

_EVEN = "is right only where all nodes have equally many workers; count those on the nodes before this one"
_SLIPS: dict[str, list[tuple[Callable[[Worker], int], str]]] = {
    "RANK": [
        (lambda w: w.local, "that is LOCAL_RANK, which begins with 0 again on every node"),
        (lambda w: w.node, "that is the number of the node, GROUP_RANK"),
        (lambda w: w.node * w.nodes[w.node] + w.local, f"node * nproc_per_node[node] + local_rank {_EVEN}"),
        (lambda w: w.node * w.nodes[0] + w.local, f"node * nproc_per_node[0] + local_rank {_EVEN}"),
        (lambda w: w.node * max(w.nodes) + w.local, f"node * max(nproc_per_node) + local_rank {_EVEN}"),
        (
            lambda w: w.local * len(w.nodes) + w.node,
            "the workers are not dealt out in turn: first come all of node 0, then all of node 1",
        ),
        (lambda w: w.before + w.local + 1, "ranks count from 0, so the first worker of all has RANK 0"),
        (
            lambda w: w.before + w.nodes[w.node] + w.local,
            "only the workers on the nodes *before* count, and those of its own node are in the sum, too",
        ),
    ],
    "LOCAL_RANK": [
        (lambda w: w.before + w.local, "that is RANK; LOCAL_RANK begins with 0 again on every node"),
        (lambda w: w.local + 1, "local ranks count from 0"),
    ],
    "GROUP_RANK": [
        (lambda w: w.before + w.local, "that is RANK; the group is the node (its agent), so it is the node's number"),
        (lambda w: w.local, "that is LOCAL_RANK; the group is the node (its agent), so it is the node's number"),
        (lambda w: w.node + 1, "nodes count from 0"),
        (lambda w: 0, "each node is a group of its own, so it is the node's number"),
    ],
    "ROLE_RANK": [
        (
            lambda w: w.local,
            "that is LOCAL_RANK; all nodes have the same role, so its ranks count through the whole job, as RANK does",
        ),
        (lambda w: 0, "all nodes have the same role, so its ranks count through the whole job, as RANK does"),
        (lambda w: w.node, "that is GROUP_RANK; ranks within a role are workers', and there is one role here"),
    ],
    "LOCAL_WORLD_SIZE": [
        (lambda w: sum(w.nodes), "that is WORLD_SIZE; the local one counts the workers on this node alone"),
        (lambda w: len(w.nodes), "that is the number of nodes; it counts the workers on this node"),
        (lambda w: w.nodes[0], "that is node 0's; each node has its own: nproc_per_node[node]"),
        (lambda w: max(w.nodes), "that is the largest node's; each node has its own: nproc_per_node[node]"),
    ],
    "WORLD_SIZE": [
        (lambda w: len(w.nodes), "that is the number of nodes; WORLD_SIZE counts workers"),
        (lambda w: w.nodes[w.node], "that is LOCAL_WORLD_SIZE, the workers on this node alone"),
        (
            lambda w: len(w.nodes) * w.nodes[w.node],
            "nodes * nproc_per_node[node] is right only where all have equally many; all ranks have one WORLD_SIZE",
        ),
        (lambda w: len(w.nodes) * w.nodes[0], "nodes * nproc_per_node[0] is right only where all have equally many"),
        (lambda w: len(w.nodes) * max(w.nodes), "nodes * max(...) is right only where all have equally many"),
        (
            lambda w: w.before + w.nodes[w.node],
            "the nodes after this one belong to the job, too; all ranks have one WORLD_SIZE",
        ),
        (lambda w: sum(w.nodes) - 1, "that is the last RANK; they count from 0"),
    ],
}  # fmt: skip
_SLIPS["ROLE_WORLD_SIZE"] = [
    (lambda w: w.nodes[w.node], "the role has workers on all nodes, so it is as large as the job, as WORLD_SIZE is"),
    (lambda w: 1, "it counts the workers of the role, not the roles: all nodes have one role, so it is WORLD_SIZE"),
    *_SLIPS["WORLD_SIZE"],
]  # fmt: skip
_SLIPS["GROUP_WORLD_SIZE"] = [
    (lambda w: w.nodes[w.node], "that is LOCAL_WORLD_SIZE; it counts the groups, which are the nodes"),
    (lambda w: sum(w.nodes), "that is WORLD_SIZE; it counts the groups, which are the nodes"),
]


def _ask(comm: Communicator, fn: Callable[..., Any]) -> list[dict[str, int] | str]:
    """For each worker its variables, or what is wrong with the answer."""
    return [_answer(fn, worker) for worker in WORKERS]


def _answer(fn: Callable[..., Any], worker: Worker) -> dict[str, int] | str:
    try:
        result = fn(list(worker.nodes), worker.node, worker.local)
    except NotImplementedError:
        raise
    except Exception as error:
        return it_raised(error)
    if not isinstance(result, Mapping):
        return f"{it_returned(result)}; expected a dict, from the variable's name to its value"
    variables = dict(result)
    missing = [name for name in RANK_VARIABLES if name not in variables and name not in OPTIONAL]
    if missing:
        return f"your dict lacks {joined(missing)}"
    foreign = [str(name) for name in variables if name not in RANK_VARIABLES]
    if foreign:
        return f"your dict holds {joined(foreign)}, which is none of {joined(list(RANK_VARIABLES))}"
    for name, value in variables.items():
        as_text = isinstance(value, str) and value.isdecimal()  # as in the environment
        if isinstance(value, bool) or not (as_text or isinstance(value, Integral)):
            return f"{name} is {value!r}; expected a whole number"
        variables[name] = int(value)
    return variables


class RankArithmetic(RunExercise):
    """f(nproc_per_node, node, local_rank) -> {"RANK": ..., ...}."""

    def judge(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        answers = run(_ask, fn, world_size=1, timeout=timeout)[0]
        for worker, answer in zip(WORKERS, answers, strict=True):
            if isinstance(answer, str):
                return failed(f"{answer} ({worker})")
        for name in RANK_VARIABLES:
            if all(name in answer for answer in answers):
                problem = _problem(name, [answer[name] for answer in answers])
                if problem:
                    return problem
        text = (
            f"passed: the variables of all {len(WORKERS)} workers of {len(JOBS)} jobs, those with unequally many "
            "workers on their nodes among them, as torchrun sets them"
        )
        return Verdict(passed=True, attempted=True, text=text)


def _problem(name: str, values: list[int]) -> Verdict | None:
    wrong = [i for i, worker in enumerate(WORKERS) if values[i] != worker.right[name]]
    if not wrong:
        return None
    first = WORKERS[wrong[0]]
    slips = [
        text for slip, text in _SLIPS[name] if all(slip(w) == v for w, v in zip(WORKERS, values, strict=True))
    ]
    why = f": {slips[0]}" if slips else ""
    lines = [
        f"node {worker.node}, local_rank {worker.local}: {name} {value}"
        + ("" if value == worker.right[name] else f", should be {worker.right[name]}")
        for worker, value in zip(WORKERS, values, strict=True)
        if worker.nodes == first.nodes
    ]
    text = f"wrong {name}: {values[wrong[0]]} where torchrun sets {first.right[name]}{why} ({first})"
    return failed(text, lines)


EXERCISE = RankArithmetic("rank_arithmetic", "nproc_per_node, node, local_rank", worker_ranks)
