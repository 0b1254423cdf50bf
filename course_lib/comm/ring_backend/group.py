"""The collectives: each method takes what torch hands over, and queues one of the course's.

The methods keep torch's names and signatures (those of its C++ class), some of which it has renamed over time.
Arguments are checked in the caller's thread (`arguments.py`); the collective then runs in the group's (`work.py`).
"""

# mypy: disable-error-code="override, assignment"
# (torch's stubs hold several signatures for one method; torch itself calls the one with lists and options)

from __future__ import annotations

from typing import Any

import torch

from course_lib.comm import collectives
from course_lib.comm.communicator import Communicator
from course_lib.comm.messages import describe
from course_lib.comm.ops import SUM
from course_lib.comm.ring import gather_around
from course_lib.comm.ring_backend import context
from course_lib.comm.ring_backend.base import QueueingGroup
from course_lib.comm.ring_backend.work import RingWork


class RingGroup(QueueingGroup):
    """A torch process group whose collectives are the course's."""

    # --- reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> RingWork:
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> RingWork:
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: list[torch.Tensor], opts: Any) -> RingWork:
        self._check_written(name, *tensors)
        op = self._op(name, SUM if opts is None else opts.reduceOp, *tensors)
        all_reduce = context.algorithms().all_reduce

        def do(comm: Communicator) -> None:
            for tensor in tensors:
                all_reduce(comm, tensor, op)

        return self._queue(name, do, tensors, opts, f"{_describe(tensors)} {op}")

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> RingWork:
        (tensor,), root = tensors, opts.rootRank
        self._check_root("reduce", root)
        self._check_written("reduce", tensor)
        op = self._op("reduce", opts.reduceOp, tensor)
        do = lambda comm: collectives.reduce(comm, tensor, root, op)
        return self._queue("reduce", do, tensors, opts, f"{describe(tensor)} {op} to {root}")

    def reduce_scatter_tensor_coalesced(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        self._check("reduce_scatter", *tensors)
        self._check_written("reduce_scatter", *outs)
        op = self._op("reduce_scatter", SUM if opts is None else opts.reduceOp, *tensors)
        for out, tensor in zip(outs, tensors, strict=True):
            self._check_chunk("reduce_scatter(out, tensor)", out, tensor)
        reduce_scatter = context.algorithms().reduce_scatter

        def do(comm: Communicator) -> None:
            for out, tensor in zip(outs, tensors, strict=True):
                reduce_scatter(comm, out, tensor, op)

        return self._queue("reduce_scatter", do, outs, opts, f"{_describe(tensors)} {op}")

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> RingWork:
        return self.reduce_scatter_tensor_coalesced([out], [tensor], opts)

    def reduce_scatter(
        self, outs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any = None
    ) -> RingWork:
        (out,), (pieces,) = outs, tensors
        self._check_list("reduce_scatter", pieces, like=out)
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in pieces])
        return self.reduce_scatter_tensor_coalesced(outs, [whole], opts)

    # --- copies

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> RingWork:
        (tensor,), root = tensors, opts.rootRank
        self._check_root("broadcast", root)
        self._check_written("broadcast", tensor)
        do = lambda comm: collectives.broadcast(comm, tensor, root)
        return self._queue("broadcast", do, tensors, opts, f"{describe(tensor)} from {root}")

    def allgather_into_tensor_coalesced(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        self._check("all_gather", *tensors)
        self._check_written("all_gather", *outs)
        for out, tensor in zip(outs, tensors, strict=True):
            self._check_chunk("all_gather(out, tensor)", tensor, out)
        all_gather = context.algorithms().all_gather

        def do(comm: Communicator) -> None:
            for out, tensor in zip(outs, tensors, strict=True):
                all_gather(comm, out, tensor)

        return self._queue("all_gather", do, outs, opts, _describe(outs))

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> RingWork:
        return self.allgather_into_tensor_coalesced([out], [tensor], opts)

    def allgather(
        self, outs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """The ranks' tensors may differ in length, if everybody's `outs` say so."""
        (pieces,), (tensor,) = outs, tensors
        self._check("all_gather", tensor)
        self._check_written("all_gather", *pieces)
        self._check_count("all_gather", pieces)
        lengths = [piece.numel() for piece in pieces]
        if lengths[self.rank()] != tensor.numel() or {piece.dtype for piece in pieces} != {tensor.dtype}:
            raise ValueError(
                f"{self._where('all_gather')}(tensor_list, tensor): expected {tensor.dtype}, and this rank's place as "
                f"long as what it gives, {tensor.numel()} elements; got {_describe(pieces)}"
            )
        equal = len(set(lengths)) == 1
        all_gather = context.algorithms().all_gather

        def do(comm: Communicator) -> None:
            whole = tensor.new_empty(sum(lengths))
            chunks, mine = list(whole.split(lengths)), tensor.reshape(-1)
            if equal:
                all_gather(comm, whole, mine)
            else:
                gather_around(comm, chunks, mine)
            for piece, chunk in zip(pieces, chunks, strict=True):
                piece.detach().copy_(chunk.view(piece.shape))

        whole = sum(lengths) if equal else " + ".join(map(str, lengths))
        return self._queue("all_gather", do, pieces, opts, f"{whole} x {_dtype(tensor)}")

    def gather(self, outs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any) -> RingWork:
        (tensor,), root = tensors, opts.rootRank
        pieces = outs[0] if self.rank() == root else []
        self._check_root("gather", root)
        self._check("gather", tensor)
        if self.rank() == root:
            self._check_written("gather", *pieces)
            self._check_list("gather", pieces, like=tensor)

        def do(comm: Communicator) -> None:
            if comm.rank != root:
                comm.send(tensor, root)
            for source, piece in enumerate(pieces):
                piece.detach().copy_(tensor) if source == root else comm.recv(piece, source)

        return self._queue("gather", do, pieces, opts, f"{describe(tensor)} to {root}")

    def scatter(self, outs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any) -> RingWork:
        (out,), root = outs, opts.rootRank
        pieces = tensors[0] if self.rank() == root else []
        self._check_root("scatter", root)
        self._check_written("scatter", out)
        if self.rank() == root:
            self._check("scatter", *pieces)
            self._check_list("scatter", pieces, like=out)

        def do(comm: Communicator) -> None:
            for to, piece in enumerate(pieces):
                out.detach().copy_(piece) if to == root else comm.send(piece, to)
            if comm.rank != root:
                comm.recv(out, root)

        return self._queue("scatter", do, outs, opts, f"{describe(out)} from {root}")

    def alltoall(self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None) -> RingWork:
        """Each pair of ranks may agree on a length of its own: the board compares message by message."""
        self._check("all_to_all", *tensors)
        self._check_written("all_to_all", *outs)
        self._check_count("all_to_all", outs)
        self._check_count("all_to_all", tensors)
        mine = self.rank()
        self._check_like("all_to_all", "the tensor for this rank itself", outs[mine], like=tensors[mine])

        def do(comm: Communicator) -> None:
            N, r = comm.world_size, comm.rank
            for step in range(1, N):
                to, source = (r + step) % N, (r - step) % N
                comm.exchange(tensors[to], to, outs[source], source)
            outs[r].detach().copy_(tensors[r])

        return self._queue("all_to_all", do, outs, opts, _dtype(tensors[0]), compares=True)

    def alltoall_base(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: list[int],
        sizes: list[int],
        opts: Any = None,
    ) -> RingWork:
        """Sizes are lengths along dim 0; no sizes: equal ones."""
        self._check("all_to_all_single", out, tensor)
        for each in (out, tensor):
            if each.dim() == 0 or each.shape[1:] != tensor.shape[1:]:
                raise ValueError(
                    f"{self._where('all_to_all_single')}(out, tensor): expected shapes alike but for dim 0, "
                    f"got {tuple(out.shape)} and {tuple(tensor.shape)}"
                )
        return self.alltoall(self._split(out, out_sizes), self._split(tensor, sizes), opts)

    def _split(self, tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        length = len(tensor)
        sizes = list(sizes) or [length // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != length:
            raise ValueError(
                f"{self._where('all_to_all_single')}: expected {self.size()} sizes that add up to the tensor's "
                f"length along dim 0, {length}; got {sizes}"
            )
        return list(tensor.detach().split(sizes))

    # The same under other names: torch's older ones, and those that C++ calls.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _describe(tensors: list[torch.Tensor]) -> str:
    return " + ".join(map(describe, tensors))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
