"""The exercises: what each hands to a learner's function, what must come out, and what it may cost.

An Exercise knows nothing of processes. `prepare` builds one rank's arguments for one case, `expected` that rank's right
result, `traffic` what every rank sends and receives; `judge` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from course_lib.classroom.checks import solutions
from course_lib.classroom.checks.cases import OP_CASES, REDUCE_CASES, Case, Placed, place, place_strided
from course_lib.comm import collectives
from course_lib.plan import traffic
from course_lib.plan.partition import chunk_bounds
from course_lib.plan.traffic import Bytes


@dataclass
class Call:
    """One rank's arguments. `target`: the tensor in which the result must stand (None: the function returns it)."""

    args: tuple[Any, ...]
    target: torch.Tensor | None
    placed: list[Placed] = field(default_factory=list)
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # name -> (tensor, copy)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def complaints(self) -> list[str]:
        """What was changed that should not be."""
        found = [f"`{name}` changed" for name, (now, copy) in self.kept.items() if not torch.equal(now, copy)]
        if any(placed.moved for placed in self.placed):
            found.append(
                "a tensor has other memory or another shape than before: write into what you are given, with copy_(...)"
            )
        if any(placed.gaps_changed for placed in self.placed):
            found.append("memory outside of the tensor changed")
        return found


@dataclass(frozen=True)
class Exercise:
    """`what`: the algorithm with its article, "a ring"; `noun`: what comes out, "sum". Formulas are for the reader."""

    name: str
    arguments: str  # after comm
    solution: Callable[..., Any]
    what: str
    noun: str
    per_rank: str  # the formula of the bytes each rank sends
    in_all: str  # … and all ranks together
    num_messages: str
    messages_in_all: str = ""
    one_neighbour: bool = False  # a rank sends to one other rank only
    same_everywhere: bool = False  # all ranks end with the same bits
    takes_op: bool = False
    in_place: bool = True  # the result stands in the first argument; else it is returned
    ranks_alike: bool = True  # who of the ranks does what is free; False: as in `traffic`, rank by rank

    @property
    def call(self) -> str:
        return f"(comm, {self.arguments})"

    def cases(self, world_size: int, with_op: bool) -> list[Case]:
        return list(OP_CASES if with_op else REDUCE_CASES)

    def prepare(self, case: Case, rank: int, world_size: int) -> Call:
        raise NotImplementedError

    def expected(self, case: Case, rank: int, world_size: int) -> torch.Tensor:
        """1-D, float64."""
        raise NotImplementedError

    def traffic(self, case: Case, world_size: int) -> tuple[list[Bytes], list[int]]:
        """(bytes, messages), an entry for each rank."""
        raise NotImplementedError

    def counts_messages(self, case: Case, world_size: int) -> bool:
        """Whether the messages of this case are judged: an empty one may be sent or left out."""
        return case.length >= world_size

    def most_hops(self, world_size: int) -> int | None:
        """The longest way of a message, from hand to hand, or None: not judged."""
        return None


class AllReduce(Exercise):
    """f(comm, tensor, op): in place."""

    def prepare(self, case: Case, rank: int, world_size: int) -> Call:
        placed = place(case.of_rank(rank), case.form)
        op = {} if case.op is None else {"op": case.op}
        return Call((placed.tensor,), placed.tensor, [placed], kwargs=op)

    def expected(self, case: Case, rank: int, world_size: int) -> torch.Tensor:
        return case.reduced(world_size)

    def traffic(self, case: Case, world_size: int) -> tuple[list[Bytes], list[int]]:
        kind = "ring" if self.one_neighbour else "tree"
        count_bytes = getattr(traffic, f"{kind}_all_reduce_bytes")
        count_messages = getattr(traffic, f"{kind}_all_reduce_messages")
        sizes = (world_size, case.length, case.itemsize)
        return count_bytes(*sizes), count_messages(*sizes)

    def most_hops(self, world_size: int) -> int | None:
        return None if self.one_neighbour else 2 * (world_size - 1).bit_length()


class ReduceScatter(Exercise):
    """f(comm, out, tensor, op): rank r's `out` gets chunk r; `tensor` stays as it is."""

    def prepare(self, case: Case, rank: int, world_size: int) -> Call:
        start, stop = chunk_bounds(case.length, world_size)[rank]
        whole, out = place(case.of_rank(rank), case.form), place_strided(stop - start, case.dtype)
        op = {} if case.op is None else {"op": case.op}
        kept = {"tensor": (whole.tensor, whole.tensor.clone())}
        if case.form != "transposed":  # one difficulty at a time
            out = Placed(out.tensor.contiguous())
        return Call((out.tensor, whole.tensor), out.tensor, [whole, out], kept, op)

    def expected(self, case: Case, rank: int, world_size: int) -> torch.Tensor:
        start, stop = chunk_bounds(case.length, world_size)[rank]
        return case.reduced(world_size)[start:stop]

    def traffic(self, case: Case, world_size: int) -> tuple[list[Bytes], list[int]]:
        sizes = (world_size, case.length, case.itemsize)
        return traffic.ring_reduce_scatter_bytes(*sizes), traffic.ring_reduce_scatter_messages(*sizes)


class PingPong(Exercise):
    """f(comm, tensor, num_rounds): in place, between ranks 0 and 1."""

    def cases(self, world_size: int, with_op: bool) -> list[Case]:
        return [
            Case(12, times=1),
            Case(12, times=3),
            Case(5, torch.int64, times=2),
            Case(1, form="scalar", times=4),
        ]

    def prepare(self, case: Case, rank: int, world_size: int) -> Call:
        placed = place(case.of_rank(rank), case.form)
        return Call((placed.tensor, case.times), placed.tensor, [placed])

    def expected(self, case: Case, rank: int, world_size: int) -> torch.Tensor:
        if world_size == 1 or rank > 1:
            return case.of_rank(rank).double()
        return case.of_rank(0).double() + case.times

    def traffic(self, case: Case, world_size: int) -> tuple[list[Bytes], list[int]]:
        rounds = [case.times if world_size > 1 and rank < 2 else 0 for rank in range(world_size)]
        return [Bytes(case.num_bytes * count, case.num_bytes * count) for count in rounds], rounds


class PassItOn(Exercise):
    """f(comm, mine) -> the numbers of all ranks, in rank order."""

    def cases(self, world_size: int, with_op: bool) -> list[Case]:
        kinds = (torch.float32, torch.int64, torch.float64)
        return [Case(1, dtype, values="mixed") for dtype in kinds]

    def prepare(self, case: Case, rank: int, world_size: int) -> Call:
        mine = case.of_rank(rank) + rank + 1  # all different, and not in the order of their size
        return Call((mine,), None)

    def expected(self, case: Case, rank: int, world_size: int) -> torch.Tensor:
        return torch.cat([case.of_rank(r).double() + r + 1 for r in range(world_size)])

    def traffic(self, case: Case, world_size: int) -> tuple[list[Bytes], list[int]]:
        size = (world_size - 1) * case.itemsize
        return [Bytes(size, size)] * world_size, [world_size - 1] * world_size

    def counts_messages(self, case: Case, world_size: int) -> bool:
        return True


_ALL: list[Exercise] = [
    PingPong(
        name="ping_pong",
        arguments="tensor, num_rounds",
        solution=solutions.ping_pong,
        what="a ping-pong",
        noun="values",
        per_rank="num_rounds*S",
        in_all="2*num_rounds*S",
        num_messages="num_rounds",
        ranks_alike=False,
    ),
    PassItOn(
        name="pass_it_on",
        arguments="mine",
        solution=solutions.pass_it_on,
        what="a ring",
        noun="numbers",
        per_rank="N-1 numbers",
        in_all="N*(N-1) numbers",
        num_messages="N-1",
        one_neighbour=True,
        in_place=False,
    ),
    AllReduce(
        name="ring_all_reduce",
        arguments="tensor",
        solution=collectives.ring_all_reduce,
        what="a ring",
        noun="sum",
        per_rank="2*(N-1)/N*S",
        in_all="2*(N-1)*S",
        num_messages="2*(N-1)",
        one_neighbour=True,
        same_everywhere=True,
        takes_op=True,
    ),
    ReduceScatter(
        name="ring_reduce_scatter",
        arguments="out, tensor",
        solution=collectives.ring_reduce_scatter,
        what="a ring",
        noun="sum",
        per_rank="(N-1)/N*S",
        in_all="(N-1)*S",
        num_messages="N-1",
        one_neighbour=True,
        takes_op=True,
    ),
    AllReduce(
        name="tree_all_reduce",
        arguments="tensor",
        solution=collectives.tree_all_reduce,
        what="a tree",
        noun="sum",
        per_rank="S to its parent and S to each child",
        in_all="2*(N-1)*S",
        num_messages="one to its parent and one to each child",
        messages_in_all="2*(N-1)",
        same_everywhere=True,
        takes_op=True,
    ),
]
EXERCISES: dict[str, Exercise] = {exercise.name: exercise for exercise in _ALL}
