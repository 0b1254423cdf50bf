"""A torch process group with a wire and a thread: what torch asks of any group, before the first collective.

Three streams of messages may be under way between the same two ranks: the collectives', the user's own, and those of
other groups. So each group has a wire of its own, a gloo group that nobody else uses; and on it the user's tags are
moved up by one, since tag 0 is the collectives'.
"""

# mypy: disable-error-code="override"
# (torch's stubs hold several signatures for one method; torch itself calls the one with lists and options)

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.board import Board, NullBoard
from course_lib.comm.communicator import Communicator
from course_lib.comm.ops import check_op
from course_lib.comm.ring_backend import context
from course_lib.comm.ring_backend.work import RingWork, Worker
from course_lib.comm.torch_collectives import RING

_NOT_HERE = {
    "allgather_coalesced": "call all_gather for each tensor",
    "gather_single": "use dist.gather with a list of tensors",
    "gather_into_tensor": "use dist.gather with a list of tensors",
    "monitored_barrier": "use dist.barrier; the launcher names a rank that does not come",
    "split_group": "use dist.new_group(ranks)",
    "merge_remote_group": "make the group anew with all its ranks",
    "new_window": 'use send and recv, or backend="gloo"',
    "reconfigure": "destroy the group and make a new one",
}


class Channel:
    """A board as one group sees it: collectives and messages are numbered for this group alone.

    Its thread runs beside the caller's, so numbers that both of them drew could differ from rank to rank. Single
    messages are compared for a plugged algorithm only: the course's own agree where the collectives do, and comparing
    would cost a quarter of a small collective's time.
    """

    def __init__(self, board: Board | NullBoard, name: str) -> None:
        self.compares_messages = False
        self.wait = board.wait
        self.collective = functools.partial(board.collective, channel=name)
        self._message = functools.partial(board.message, channel=name)

    def message(self, *what: Any) -> None:
        if self.compares_messages:
            self._message(*what)


class QueueingGroup(dist.ProcessGroup):
    """Has a wire, and a thread that does what is queued. `options`: torch's, see `register`."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.store, options.group_rank, options.group_size)
        place = options.store, options.group_rank, options.group_size
        self._name: str = options.group_id
        self._wire: Any = dist.ProcessGroupGloo(*place, timeout=options.timeout)
        # torch looks at the backend for what is asked of a device: timeouts, whether sends can be batched.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._wire)
        self._worker = Worker(f"ring {self._name}")

    # --- the communicator that the collectives run on

    @functools.cached_property
    def comm(self) -> Communicator:
        """Made at the first collective, when torch knows the group. It sends on the wire."""
        launch, shared = context.launch(), {}
        if launch is not None:
            ranks = dist.get_process_group_ranks(self)
            host_of = [launch.host_of[rank] for rank in ranks]
            shared = {
                "ledger": launch.ledger,
                "trace": launch.trace,
                "host_of": host_of,
                "pacer": launch.pacer,
            }
        comm = Communicator(self, board=Channel(context.board(), self._name), **shared)  # type: ignore[arg-type]
        comm.group = self._wire
        return comm

    def _queue(
        self,
        name: str,
        do: Callable[[Communicator], Any],
        outputs: Sequence[torch.Tensor],
        opts: Any,
        signature: str = "",
    ) -> RingWork:
        """Do `do(comm)` when its turn comes. `opts`: torch's. `signature`: what must be the same on all ranks."""
        run = functools.partial(self._run, name, do, signature, context.is_plugged())
        waits = not getattr(opts, "asyncOp", True)
        return self._worker.hand(RingWork(name, run, list(outputs)), now=waits)

    def _run(self, name: str, do: Callable[[Communicator], Any], signature: str, is_plugged: bool) -> None:
        comm, launch = self.comm, context.launch()
        comm.board.compares_messages = is_plugged  # type: ignore[union-attr]
        if launch is not None:
            comm.t0 = launch.t0  # a pool's launches begin one after the other
        with comm.board.collective(name, comm.ranks, signature):
            do(comm)

    def _check(self, name: str, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise ValueError(
                    f'rank {self.rank()}: {name}(tensor): backend "ring" takes dense tensors on the CPU, got '
                    f"{tensor.layout} on {tensor.device}; move it with .cpu(), to_dense(), or use another backend"
                )

    def _op(self, name: str, op: Any, tensor: torch.Tensor) -> str:
        try:
            return check_op(op, tensor)
        except ValueError as error:
            raise ValueError(f"rank {self.rank()}: {name}: {error}") from None

    # --- the wire's own: they carry no reduction, or nothing at all

    def barrier(self, opts: Any = None) -> RingWork:
        return self._queue("barrier", lambda comm: self._wire.barrier().wait(), [], opts)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        self._check("send", *tensors)
        return self._wire.send([tensor.contiguous() for tensor in tensors], to, tag + 1)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        self._check_place("recv", tensors)
        return self._wire.recv(tensors, source, tag + 1)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        self._check_place("recv", tensors)
        return self._wire.recv_anysource(tensors, tag + 1)

    def _check_place(self, name: str, tensors: list[torch.Tensor]) -> None:
        self._check(name, *tensors)
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(
                    f"rank {self.rank()}: {name}(tensor): expected a contiguous tensor, got strides {tensor.stride()}; "
                    "receive into a new tensor and copy it"
                )

    # --- the group itself

    def start_coalescing(self, device: torch.device) -> None:
        """Collectives that follow may be joined into one. They stand in a queue anyway, so there is nothing to do."""

    def end_coalescing(self, device: torch.device) -> RingWork:
        """Done when all before it are."""
        return self._worker.hand(RingWork("coalesced", lambda: None, []))

    def shutdown(self) -> None:
        """End the thread. Called by `dist.destroy_process_group`."""
        self._worker.stop()

    def getBackendName(self) -> str:
        return RING

    @property
    def group_name(self) -> str:
        return self._name

    recvAnysource = recv_anysource  # what C++ calls
    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing


def _refuse(name: str, instead: str) -> Callable:
    def refused(self: QueueingGroup, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f'rank {self.rank()}: backend "ring" has no {name}: {instead}')

    return refused


for _name, _instead in _NOT_HERE.items():
    setattr(QueueingGroup, _name, _refuse(_name, _instead))
