"""The Communicator: how a rank talks, with every byte counted.

It wraps an initialised `torch.distributed` process group and does four things that the bare calls do not:

* it writes each operation into a ledger (bytes, messages, times) and, where asked, into a trace;
* it tells the board what it is about to wait for, so that a hang can be explained;
* it checks its arguments before any byte moves, since a wrong one usually shows up as a hang on another rank;
* it moves non-contiguous tensors correctly, and meets torch's renamed collectives in this one place.

`send`, `recv` and `exchange` (in `messages.py`) are counted exactly. `broadcast`, `all_reduce`, `reduce_scatter` and
`all_gather` call torch's own collectives, whose messages nobody can see: their rows are marked `exact=False` and hold the
traffic of a bandwidth-optimal algorithm.

Ranks given as arguments are ranks *of this communicator*, 0 … world_size-1. Ledger rows, traces and `ranks` hold global
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.board import Board, NullBoard
from course_lib.comm.ledger import Ledger, Row
from course_lib.comm.messages import Handle, Messenger, copy_back, describe
from course_lib.comm.pacer import Pacer
from course_lib.comm.ops import AVG, SUM, check_op, torch_op
from course_lib.comm.trace import Event, Trace
from course_lib.plan import traffic

# Renamed in torch 2.14, where the old names warn; before, the old names are the only ones.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator(Messenger):
    """A rank's end of a process group.

    `group`: a torch process group (None: the default one). `device`: where this rank's tensors live. `t0`: the
    `time.monotonic()` at which the launch began (None: now). `board`, `ledger`, `trace`: where to write (None: a board
    that nobody watches, a new ledger, a new trace). `host_of`: the host number of each rank of the group (None: all on 0).
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

    # --- torch's own collectives

    def barrier(self) -> None:
        """Return when all ranks of this communicator have come here."""
        devices = [self.device.index or 0] if self.device.type == "cuda" else None
        call = lambda: dist.barrier(self.group, async_op=True, device_ids=devices)
        self._collective("barrier", "", call, traffic.Bytes(0, 0), 0)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, async_op: bool = False) -> Handle | None:
        """Copy rank `root`'s `tensor` into every rank's, in place."""
        self.check_tensor("broadcast(tensor)", tensor)
        self.check_root("broadcast(root)", root)
        dense = tensor.contiguous()
        call = lambda: dist.broadcast(dense, group=self.group, group_src=root, async_op=True)
        sizes = (self.world_size, tensor.numel(), tensor.element_size())
        counts = traffic.chain_broadcast_bytes(*sizes, root=root)[self.rank]
        messages = traffic.chain_broadcast_messages(*sizes, root=root)[self.rank]
        signature = f"{describe(tensor)} from {root}"
        finish = lambda: copy_back(dense, tensor)
        return self._collective("broadcast", signature, call, counts, messages, finish, async_op)

    def all_reduce(self, tensor: torch.Tensor, op: Any = SUM, async_op: bool = False) -> Handle | None:
        """Reduce `tensor` over all ranks, in place; all get the result. `op`: "sum", "avg", "max", "min", "product"."""
        self.check_tensor("all_reduce(tensor)", tensor)
        name, dense = check_op(op, tensor), tensor.contiguous()
        call = lambda: dist.all_reduce(dense, self._torch_op(name), self.group, async_op=True)
        counts = traffic.ring_all_reduce_bytes(self.world_size, tensor.numel(), tensor.element_size())[
            self.rank
        ]
        signature, messages = f"{describe(tensor)} {name}", 2 * (self.world_size - 1)
        finish = lambda: copy_back(self._averaged(dense, name), tensor)
        return self._collective("all_reduce", signature, call, counts, messages, finish, async_op)

    def reduce_scatter(
        self, out: torch.Tensor, tensor: torch.Tensor, op: Any = SUM, async_op: bool = False
    ) -> Handle | None:
        """Reduce `tensor`, world_size chunks long, over all ranks; rank r gets chunk r in `out`."""
        self.check_tensor("reduce_scatter(out)", out)
        self.check_tensor("reduce_scatter(tensor)", tensor)
        self._check_chunks("reduce_scatter(out, tensor)", whole=tensor, chunk=out)
        name, dense, whole = check_op(op, tensor), out.contiguous(), tensor.contiguous()
        flat = (dense.view(-1), whole.view(-1))
        call = lambda: _reduce_scatter(*flat, self._torch_op(name), self.group, async_op=True)
        counts = traffic.ring_reduce_scatter_bytes(self.world_size, whole.numel(), whole.element_size())[
            self.rank
        ]
        signature, messages = f"{describe(tensor)} {name}", self.world_size - 1
        finish = lambda: copy_back(self._averaged(dense, name), out)
        return self._collective("reduce_scatter", signature, call, counts, messages, finish, async_op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, async_op: bool = False) -> Handle | None:
        """Every rank gives `tensor`; all get them side by side, in rank order, in `out`, world_size times as long."""
        self.check_tensor("all_gather(out)", out)
        self.check_tensor("all_gather(tensor)", tensor)
        self._check_chunks("all_gather(out, tensor)", whole=out, chunk=tensor)
        dense, chunk = out.contiguous(), tensor.contiguous()
        call = lambda: _all_gather(dense.view(-1), chunk.view(-1), self.group, async_op=True)
        counts = traffic.ring_all_gather_bytes(self.world_size, out.numel(), out.element_size())[self.rank]
        finish, messages = lambda: copy_back(dense, out), self.world_size - 1
        return self._collective("all_gather", describe(out), call, counts, messages, finish, async_op)

    def _collective(
        self,
        op: str,
        signature: str,
        call: Callable[[], Any],
        counts: traffic.Bytes,
        messages: int,
        finish: Callable[[], Any] | None = None,
        async_op: bool = False,
    ) -> Handle | None:
        """Start one of torch's collectives. Its end is noted when it ends, which may be long before it is waited for."""
        row = Row(op, None, *counts, messages, self.now(), 0.0, exact=False, group=self.ranks)
        with self.board.collective(op, self.ranks, signature):
            with self.board.wait(op):
                work = call()
            handle = Handle(self.board, self.ledger, self.now, [work], row, finish)
            if not async_op:
                handle.wait()
                return None
        if self.device.type == "cpu":
            work.get_future().add_done_callback(lambda _: handle.note_end())
        return handle

    def _torch_op(self, name: str) -> Any:
        return torch_op(SUM if name == AVG and self.backend != "nccl" else name)

    def _averaged(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Not every backend can average. Where it cannot, the ranks add, and this is where they divide."""
        return tensor.div_(self.world_size) if name == AVG and self.backend != "nccl" else tensor

    def _check_chunks(self, argument: str, whole: torch.Tensor, chunk: torch.Tensor) -> None:
        if whole.numel() != self.world_size * chunk.numel() or whole.dtype != chunk.dtype:
            raise ValueError(
                f"rank {self.global_rank}: {argument}: expected the same dtype, and one tensor {self.world_size} times "
                f"as long as the other; got {describe(whole)} and {describe(chunk)}"
            )

    # --- groups

    def subgroup(self, ranks: Iterable[int]) -> Communicator | None:
        """A communicator of `ranks` (of this one, ascending); the same ledger, trace and board. None on other ranks.

        Only its members need to call. Ranks that share several overlapping groups must make them in the same order.
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
            with self.board.wait(f"subgroup {list(key)}"):
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

        The board compares its name, the length and dtype of `tensor`, and `words` (the reduction, say) with what the
        other ranks wrote, before the first byte moves: they must agree. In the trace it is an event of lane "collective".
        """
        signature = " ".join([describe(tensor), *map(str, words)])
        with self.board.collective(name, self.ranks, signature), self.span(name, "collective", of=signature):
            yield

    def progress(self, iterable: Iterable[Any], total: int | None = None, desc: str = "") -> Iterator[Any]:
        """Iterate, and let global rank 0 report how far it is, at most ten times a second.

        A report is `{"desc", "n", "total", "done"}`; the launcher draws it. Elsewhere this is plain iteration.
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
