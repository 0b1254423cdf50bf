"""The Communicator: how a rank talks, with every byte counted.

It wraps an initialised `torch.distributed` process group and does four things that the bare calls do not:

* it writes each operation into a ledger (bytes, messages, times) and, where asked, into a trace;
* it tells the board what it is about to wait for, so that a hang can be explained;
* it checks its arguments before any byte moves, since a wrong one usually shows up as a hang on another rank;
* it moves non-contiguous tensors correctly, and meets torch's renamed collectives in this one place.

Messages (`messages.py`) are counted exactly; torch's own collectives (`torch_collectives.py`) by formula. Our
collectives (`collectives.py`) are functions that take a Communicator and use its messages alone.

Ranks given as arguments are ranks *of this communicator*, 0 … world_size-1. Ledger rows, traces and `ranks`
hold global ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.board import Board, NullBoard
from course_lib.comm.ledger import Ledger
from course_lib.comm.messages import describe
from course_lib.comm.pacer import Pacer
from course_lib.comm.torch_collectives import TorchCollectives
from course_lib.comm.trace import Event, Trace


@contextmanager
def _named_after_its_ranks() -> Iterator[None]:
    """A group made inside has the same name on all its members, and does not count.

    torch puts into a group's name how many groups this process has made. Ranks that are in different groups have made
    different numbers, and would wait for each other under different names, for ever; also later, in groups that all
    ranks make.
    """
    c10d: Any = dist.distributed_c10d
    before, count = c10d._hash_ranks_to_str, c10d._world.group_count
    c10d._hash_ranks_to_str = lambda ranks: "ranks " + " ".join(map(str, ranks))
    try:
        yield
    finally:
        c10d._hash_ranks_to_str, c10d._world.group_count = before, count


class Communicator(TorchCollectives):
    """A rank's end of a process group.

    `group`: a torch process group (None: the default one). `device`: where this rank's tensors live. `t0`:
    the `time.monotonic()` at which the launch began (None: now). `board`, `ledger`, `trace`: where to write
    (None: a board that nobody watches, a new ledger, a new trace). `host_of`: the host number of each rank of
    the group (None: all on 0). `pacer`: limits messages between hosts (None: nothing does).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        *,
        t0: float | None = None,
        board: Board | NullBoard | None = None,
        ledger: Ledger | None = None,
        trace: Trace | None = None,
        host_of: Sequence[int] | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        super().__init__(group, device, t0, board, ledger, trace)
        self.host_of = (0,) * self.world_size if host_of is None else tuple(host_of)
        self.pacer = pacer
        if len(self.host_of) != self.world_size:
            raise ValueError(
                f"host_of: expected a host number for each of {self.world_size} ranks, got {self.host_of}"
            )
        self._report: Callable[[dict[str, Any]], None] | None = None  # set by the launcher, see `progress`
        self._subgroups: dict[tuple[int, ...], Communicator] = {self.ranks: self}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"rank {self.global_rank}: a Communicator cannot be copied or pickled: it stands for this process's "
            "connections. Of a model that holds one, save the state_dict()"
        )

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.world_size}, {self.backend}, {self.device})"

    @property
    def num_hosts(self) -> int:
        return len(set(self.host_of))

    def begin_run(self, t0: float) -> None:
        """A new launch on the same ranks: its clock begins at `t0`, its ledger and its trace are empty."""
        self.ledger.clear()
        self.trace.clear()
        for communicator in self._subgroups.values():
            communicator.t0 = t0

    # --- groups

    def subgroup(self, ranks: Iterable[int]) -> Communicator | None:
        """A communicator of `ranks` (of this one, ascending); None on the other ranks.

        It writes into the same ledger, trace and board. Only its members need to call. Ranks that share
        several groups must make those in the same order.
        """
        members = list(ranks)
        if not members or members != sorted({rank for rank in members if 0 <= rank < self.world_size}):
            raise ValueError(
                f"rank {self.global_rank}: subgroup(ranks): expected some of the ranks 0…{self.world_size - 1} "
                f"in ascending order, each once, got {members}"
            )
        if self.rank not in members:
            return None
        key = tuple(self.ranks[rank] for rank in members)
        if key not in self._subgroups:
            with self.board.wait(f"subgroup {list(key)}"), _named_after_its_ranks():
                group = dist.new_group(list(key), use_local_synchronization=True)
            host_of = [self.host_of[rank] for rank in members]
            self._subgroups[key] = self._derived(group, host_of)
        return self._subgroups[key]

    def _derived(self, group: Any, host_of: Sequence[int]) -> Communicator:
        derived = Communicator(
            group,
            self.device,
            t0=self.t0,
            board=self.board,
            ledger=self.ledger,
            trace=self.trace,
            host_of=host_of,
            pacer=self.pacer,
        )
        derived._report, derived._subgroups = self._report, self._subgroups
        return derived

    # --- marks on the timeline

    @contextmanager
    def span(self, name: str, lane: str = "compute", **detail: Any) -> Iterator[None]:
        """What happens inside becomes an event of the trace."""
        start_s = self.now()
        try:
            yield
        finally:
            self.trace.add(Event(self.global_rank, name, start_s, self.now(), lane, detail))

    @contextmanager
    def collective(self, name: str, tensor: torch.Tensor, *words: object) -> Iterator[None]:
        """What happens inside is the collective `name`, built from messages.

        The board compares its name, the length and dtype of `tensor`, and `words` (the reduction, say) with
        what the other ranks wrote, before the first byte moves: they must agree. In the trace it is an event
        of lane "collective".
        """
        signature = " ".join([describe(tensor), *map(str, words)])
        with self.board.collective(name, self.ranks, signature), self.span(name, "collective", of=signature):
            yield

    def progress(self, iterable: Iterable[Any], total: int | None = None, desc: str = "") -> Iterator[Any]:
        """Iterate, and let global rank 0 report how far it is, at most ten times a second.

        A report is `{"desc", "n", "total", "done"}`, which the launcher draws.
        """
        if self._report is None or self.global_rank != 0:
            yield from iterable
            return
        if total is None and isinstance(iterable, Sized):
            total = len(iterable)
        n, told = 0, 0.0
        try:
            for item in iterable:
                if time.monotonic() - told > 0.1:
                    told = time.monotonic()
                    self._report({"desc": desc, "n": n, "total": total, "done": False})
                yield item
                n += 1
        finally:
            self._report({"desc": desc, "n": n, "total": total, "done": True})
