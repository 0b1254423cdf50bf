"""Messages between two ranks: checked before, counted after.

Every call becomes a batch of transfers. On a GPU the batch goes out as one group (`batch_isend_irecv`), because NCCL
runs transfers one after the other and two ranks that both send first would wait for each other for ever. On the CPU
transfers run side by side anyway.

Two habits of the libraries below are dealt with here. gloo sends the *memory* of a non-contiguous tensor, not its
elements, so such tensors travel through a dense copy. And a message to oneself is an error in one library and a hang in
another, so it is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.board import Board, NullBoard
from course_lib.comm.ledger import Ledger, Row
from course_lib.comm.pacer import Pacer
from course_lib.comm.trace import Trace


@dataclass
class Handle:
    """A communication under way: `wait()` returns when it is done, and only then writes its row into the ledger."""

    board: Board | NullBoard
    ledger: Ledger
    clock: Callable[[], float]
    works: Sequence[Any]  # torch's handles
    row: Row  # without its end
    finish: Callable[[], Any] | None = None  # what is left to do when the bytes are there
    ended_s: float | None = None
    done: bool = False

    def wait(self) -> None:
        """Wait for the end. A second call does nothing."""
        if self.done:
            return
        with self.board.wait(self.row.op, self.row.peer):
            for work in self.works:
                work.wait()
        self.done = True
        end_s = self.note_end()
        if self.finish is not None:
            self.finish()
        self.ledger.add(replace(self.row, end_s=end_s))

    def note_end(self) -> float:
        """The communication is over. Called by `wait`, or before it by a library that calls back."""
        if self.ended_s is None:
            self.ended_s = self.clock()
        return self.ended_s


@dataclass
class _Due:
    """A paced message's due time, in one float64: like one of torch's handles, to be waited for after the message."""

    at: torch.Tensor

    def wait(self) -> None:
        time.sleep(max(0.0, self.at.item() - time.monotonic()))


class Messenger:
    """The half of the Communicator that sends and receives. The arguments are described there."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        t0: float | None,
        board: Board | NullBoard | None,
        ledger: Ledger | None,
        trace: Trace | None,
    ) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(self.group))
        self.rank: int = dist.get_rank(self.group)
        self.world_size: int = len(self.ranks)
        self.device = torch.device(device)
        self.backend: str = dist.get_backend(self.group)
        self.t0: float = time.monotonic() if t0 is None else t0
        self.board: Board | NullBoard = NullBoard() if board is None else board
        self.ledger = Ledger() if ledger is None else ledger
        self.trace = Trace() if trace is None else trace
        self.host_of: tuple[int, ...] = (0,) * self.world_size
        self.pacer: Pacer | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def global_rank(self) -> int:
        """This rank's number in the whole launch (`rank` is its number in this group)."""
        return self.ranks[self.rank]

    def now(self) -> float:
        """Seconds since the launch began, on the clock of the ledger and the trace."""
        return time.monotonic() - self.t0

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send `tensor` to rank `to`. Returns when it may be changed again."""
        self.check_tensor("send(tensor)", tensor)
        self.check_peer("send(to)", to)
        self._transfer("send", sends=[(tensor, to)]).wait()

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor` with what rank `source` sends. Its length and dtype must be the sender's."""
        self.check_tensor("recv(tensor)", tensor)
        self.check_peer("recv(source)", source)
        self._transfer("recv", receives=[(tensor, source)]).wait()

    def exchange(
        self, send: torch.Tensor, to: int, recv: torch.Tensor, source: int, async_op: bool = False
    ) -> Handle | None:
        """Send `send` to rank `to` and at the same time receive `recv` from rank `source`.

        Both go out as one batch, so that no order of ranks can deadlock, whatever the backend. With `async_op=True` it
        returns a handle at once; wait on it before you read `recv` or change `send`.
        """
        self.check_tensor("exchange(send)", send)
        self.check_tensor("exchange(recv)", recv)
        self.check_peer("exchange(to)", to)
        self.check_peer("exchange(source)", source)
        handle = self._transfer("exchange", sends=[(send, to)], receives=[(recv, source)])
        if async_op:
            return handle
        handle.wait()
        return None

    def _transfer(self, op: str, sends: Sequence = (), receives: Sequence = ()) -> Handle:
        start_s = self.now()
        dense_sends = [(tensor.contiguous(), to) for tensor, to in sends]
        dense_receives = [(_dense(tensor), source) for tensor, source in receives]
        peer = self.ranks[(sends or receives)[0][1]]
        with self.board.wait(op, peer):  # starting may block, too: NCCL connects at the first message
            works = self._start(dense_sends, dense_receives)
        sent = sum(nbytes(tensor) for tensor, _ in sends)
        received = sum(nbytes(tensor) for tensor, _ in receives)
        row = Row(op, peer, sent, received, len(sends), start_s, start_s, True, self.ranks)

        def finish() -> None:
            for (tensor, _), (dense, _) in zip(receives, dense_receives, strict=True):
                copy_back(dense, tensor)

        return Handle(self.board, self.ledger, self.now, works, row, finish)

    def _start(self, sends: Sequence, receives: Sequence) -> list[Any]:
        """Post the receives first: bytes that arrive then have a place to go to."""
        if self.pacer is not None:
            return [work for receive in receives for work in self._paced_irecv(*receive)] + [
                work for send in sends for work in self._paced_isend(*send)
            ]
        if self.device.type == "cpu":
            works = [dist.irecv(tensor, group=self.group, group_src=source) for tensor, source in receives]
            return works + [dist.isend(tensor, group=self.group, group_dst=to) for tensor, to in sends]
        batch = [(dist.irecv, *receive) for receive in receives] + [(dist.isend, *send) for send in sends]
        operations = [dist.P2POp(call, tensor, group=self.group, group_peer=p) for call, tensor, p in batch]
        return dist.batch_isend_irecv(operations)

    def _paced_isend(self, tensor: torch.Tensor, to: int) -> list[Any]:
        """Send with its due time ahead, if it goes to another host (see `comm.pacer`)."""
        here, there = self.host_of[self.rank], self.host_of[to]
        work = lambda part: dist.isend(part, group=self.group, group_dst=to)
        if here == there or self.pacer is None:
            return [work(tensor)]
        due = torch.tensor([self.pacer.reserve(here, there, nbytes(tensor))], dtype=torch.float64)
        return [work(due), work(tensor), _Due(due)]

    def _paced_irecv(self, tensor: torch.Tensor, source: int) -> list[Any]:
        work = lambda part: dist.irecv(part, group=self.group, group_src=source)
        if self.host_of[self.rank] == self.host_of[source]:
            return [work(tensor)]
        due = torch.empty(1, dtype=torch.float64)
        return [work(due), work(tensor), _Due(due)]

    def check_tensor(self, argument: str, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"rank {self.global_rank}: {argument}: expected a tensor, got {type(tensor).__name__}"
            )
        mine = self.device
        if tensor.device.type != mine.type or mine.index not in (None, tensor.device.index):
            raise ValueError(
                f"rank {self.global_rank}: {argument}: expected a tensor on {mine}, this rank's device, "
                f"got one on {tensor.device}; move it with tensor.to(comm.device)"
            )

    def check_peer(self, argument: str, peer: Any) -> None:
        where = f"rank {self.global_rank}: {argument}: "
        if not isinstance(peer, int) or not 0 <= peer < self.world_size:
            raise ValueError(
                f"{where}expected a rank of this communicator, 0…{self.world_size - 1}, got {peer!r}"
            )
        if peer == self.rank:
            raise ValueError(f"{where}expected another rank, got {peer}, which is this rank itself")

    def check_root(self, argument: str, root: Any) -> None:
        if root != self.rank:
            self.check_peer(argument, root)

    def scratch(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """`length` elements to receive into, kept from call to call: fresh memory costs a page fault every 4 KiB."""
        needed = length * dtype.itemsize
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8, device=self.device)
        return self._scratch[:needed].view(dtype)


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements: what its message carries."""
    return tensor.numel() * tensor.element_size()


def describe(tensor: torch.Tensor) -> str:
    """What must be the same on all ranks, for example "12 x float32"."""
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself if its elements lie side by side, else an empty tensor of its shape whose elements do."""
    return (
        tensor
        if tensor.is_contiguous()
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    )


def copy_back(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bring what arrived in `dense` into `tensor`, for which it stood in; nothing to do if they are the same."""
    if dense is not tensor:
        tensor.copy_(dense)
