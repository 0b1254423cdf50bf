"""A torch process group with a wire and a thread: what torch asks of any group, before the first collective.

Three streams of messages may be under way between the same two ranks: the collectives', the user's own, and those of
other groups. So each group has a wire of its own, a gloo group that nobody else uses; and on it the user's tags are
moved up by one, since tag 0 is the collectives'.
"""

# mypy: disable-error-code="override"
# (torch's stubs hold several signatures for one method; torch itself calls the one with lists and options)

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.board import Board, NullBoard
from course_lib.comm.communicator import Communicator
from course_lib.comm.ring_backend import context
from course_lib.comm.ring_backend.arguments import CheckingGroup
from course_lib.comm.ring_backend.work import RingWork, Worker
from course_lib.comm.torch_collectives import RING

_LATE = re.compile(r"gloo.*timed out waiting (\d+) ?ms", re.IGNORECASE)
_GONE = re.compile(r"gloo.*(closed|reset|broken pipe)", re.IGNORECASE)
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
    messages are compared for all_to_all and for a plugged algorithm only: the others agree where the collectives do,
    and comparing would cost a quarter of a small collective's time.
    """

    def __init__(self, board: Board | NullBoard, name: str) -> None:
        self.compares_messages = False
        self.wait = board.wait
        self.collective = functools.partial(board.collective, channel=name)
        self._message = functools.partial(board.message, channel=name)

    def message(self, *what: Any) -> None:
        if self.compares_messages:
            self._message(*what)


class QueueingGroup(CheckingGroup):
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
        compares: bool = False,
    ) -> RingWork:
        """Do `do(comm)` when its turn comes. `opts`: torch's. `signature`: what must be the same on all ranks.
        `compares`: the ranks' signatures do not say how long each message is, so messages are compared as well.
        """
        run = functools.partial(self._run, name, do, signature, compares or context.is_plugged())
        waits = not getattr(opts, "asyncOp", True)
        return self._worker.hand(RingWork(name, run, list(outputs)), now=waits)

    def _run(self, name: str, do: Callable[[Communicator], Any], signature: str, compares: bool) -> None:
        comm, launch = self.comm, context.launch()
        comm.board.compares_messages = compares  # type: ignore[union-attr]
        if launch is not None:
            comm.t0 = launch.t0  # a pool's launches begin one after the other
        what = f"{name} of {signature}" if signature else name
        with comm.board.collective(name, comm.ranks, signature), _told(comm, what):
            do(comm)

    # --- the wire's own: they carry no reduction, or nothing at all

    def barrier(self, opts: Any = None) -> RingWork:
        return self._queue("barrier", lambda comm: self._wire.barrier().wait(), [], opts)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        self._check("send", *tensors)
        return self._wire.send([tensor.contiguous() for tensor in tensors], to, self._tag("send", tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        self._check_contiguous("recv", tensors)
        return self._wire.recv(tensors, source, self._tag("recv", tag))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        self._check_contiguous("recv", tensors)
        return self._wire.recv_anysource(tensors, self._tag("recv", tag))

    def _tag(self, name: str, tag: int) -> int:
        if tag < 0:  # -1 would be the collectives' own
            raise ValueError(f"{self._where(name)}(tag): expected 0 or a greater number, got {tag}")
        return tag + 1

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
        raise NotImplementedError(f'{self._where(name)}: backend "ring" cannot do this: {instead}')

    return refused


for _name, _instead in _NOT_HERE.items():
    setattr(QueueingGroup, _name, _refuse(_name, _instead))


@contextmanager
def _told(comm: Communicator, what: str) -> Iterator[None]:
    """gloo says which of its own lines failed. Say which collective did, and what that means."""
    try:
        yield
    except RuntimeError as error:
        late, gone = _LATE.search(str(error)), _GONE.search(str(error))
        if not late and not gone:
            raise
        why = "connection closed by peer: another rank has probably ended, or given up; look for its own error first"
        if late:
            seconds = int(late[1]) / 1000
            why = f"wait timeout: no answer within {seconds} s; did every rank call it?"
        where = f"rank {comm.global_rank}: {what}, ranks {list(comm.ranks)}"
        raise RuntimeError(f"{where}: {why}") from error
