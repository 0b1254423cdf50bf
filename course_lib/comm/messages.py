"""Messages between two ranks: checked before, counted after.

Every call becomes a batch of transfers. On a GPU the batch goes out as one group (`batch_isend_irecv`),
because NCCL runs transfers one after the other and two ranks that both send first would wait for each other
for ever. On the CPU transfers run side by side anyway.

Two habits of the libraries below are dealt with here. gloo sends the *memory* of a non-contiguous tensor, not
its elements, so such tensors travel through a dense copy. And a message to oneself is an error in one library
and a hang in another, so it is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.board import Board, NullBoard
from course_lib.comm.ledger import Ledger, Row
from course_lib.comm.pacer import Due, Pacer
from course_lib.comm.trace import Trace


class Handle:
    """A communication under way.

    `wait()` returns when it is done, and only then writes its row into the ledger.
    """

    def __init__(
        self,
        owner: Messenger,
        op: str,
        peer: int | None,
        counts: tuple[int, int, int] | None,
        finish: Callable[[], Any] | None = None,
        exact: bool = True,
    ) -> None:
        """`counts`: bytes sent, bytes received, messages; None: no row, since its messages have rows of their own.
        `finish`: to do when all bytes are there.
        """
        self.works: Sequence[Any] = ()  # torch's own handles
        self._owner, self._op, self._peer = owner, op, peer
        self._counts, self._finish, self._exact = counts, finish, exact
        self._start_s = owner.now()
        self._end_s: float | None = None
        self._done = False

    def wait(self) -> None:
        """Wait for the end. A second call does nothing: gloo itself would take it for the next message, and hang."""
        if self._done:
            return
        with self._owner.board.wait(self._op, self._peer):
            for work in self.works:
                work.wait()
        self._done = True
        end_s = self.note_end()
        if self._finish is not None:
            self._finish()
        if self._counts is not None:
            group = self._owner.ranks
            row = Row(self._op, self._peer, *self._counts, self._start_s, end_s, self._exact, group)
            self._owner.ledger.add(row)

    def note_end(self) -> float:
        """The communication is over. Called by `wait`, or before it by a library that calls back."""
        if self._end_s is None:
            self._end_s = self._owner.now()
        return self._end_s


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
        self.pacer: Pacer | None = None  # holds messages to a link's rate, where nothing else does
        # Receives that began before their exchange: id of the tensor -> it, and torch's handles.
        self._expected: dict[int, tuple[torch.Tensor, list[Any]]] = {}
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
        handle = Handle(self, "send", self.ranks[to], (nbytes(tensor), 0, 1))
        handle.works = self._start("send", (dist.isend, tensor.contiguous(), to))
        handle.wait()

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor` with what rank `source` sends. Its length and dtype must be the sender's."""
        self.check_tensor("recv(tensor)", tensor)
        self.check_peer("recv(source)", source)
        dense = _dense_like(tensor)
        finish = lambda: copy_back(dense, tensor)
        handle = Handle(self, "recv", self.ranks[source], (0, nbytes(tensor), 0), finish)
        handle.works = self._start("recv", (dist.irecv, dense, source))
        handle.wait()

    def exchange(
        self, send: torch.Tensor, to: int, recv: torch.Tensor, source: int, async_op: bool = False
    ) -> Handle | None:
        """Send `send` to rank `to` and at the same time receive `recv` from rank `source`.

        Both go out as one batch, so that no order of ranks can deadlock, whatever the backend. With
        `async_op=True` it returns a handle at once; wait on it before you read `recv` or change `send`.
        """
        self.check_tensor("exchange(send)", send)
        self.check_tensor("exchange(recv)", recv)
        self.check_peer("exchange(to)", to)
        self.check_peer("exchange(source)", source)
        dense = _dense_like(recv)
        finish = lambda: copy_back(dense, recv)
        handle = Handle(self, "exchange", self.ranks[to], (nbytes(send), nbytes(recv), 1), finish)
        receiving, sending = (dist.irecv, dense, source), (dist.isend, send.contiguous(), to)
        if id(recv) in self._expected:
            handle.works = [*self._expected.pop(id(recv))[1], *self._start("exchange", sending)]
        else:  # the receive goes out first: bytes that arrive then have a place to go to
            handle.works = self._start("exchange", receiving, sending)
        if async_op:
            return handle
        handle.wait()
        return None

    def expect(self, recv: torch.Tensor, source: int) -> None:
        """Say early that a later exchange will receive `recv`, this very object, from rank `source`.

        What arrives before that exchange then has a place to go to, which saves the sender a question. Whatever is
        received from one rank must be expected in order. On a GPU a receive goes out with the batch of its exchange,
        so there it does nothing.
        """
        self.check_tensor("expect(recv)", recv)
        self.check_peer("expect(source)", source)
        if not recv.is_contiguous():
            raise ValueError(
                f"rank {self.global_rank}: expect(recv): expected a contiguous tensor, got strides {recv.stride()}"
            )
        if self.device.type == "cpu":
            self._expected[id(recv)] = (recv, self._on_cpu(dist.irecv, recv, source))

    def _start(self, op: str, *transfers: tuple[Callable, torch.Tensor, int]) -> list[Any]:
        """Hand the transfers (isend or irecv, tensor, peer) to torch; its handles."""
        if self.device.type == "cpu":
            return [work for transfer in transfers for work in self._on_cpu(*transfer)]
        batch = [dist.P2POp(call, tensor, group=self.group, group_peer=p) for call, tensor, p in transfers]
        with self.board.wait(op, self.ranks[transfers[0][2]]):  # NCCL connects at the first message
            return dist.batch_isend_irecv(batch)

    def _on_cpu(self, call: Callable, tensor: torch.Tensor, peer: int) -> list[Any]:
        # Straight to the group: the checks of dist.isend, made once more, cost as much as a small message.
        start = self.group.send if call is dist.isend else self.group.recv
        self.board.message(call is dist.isend, self.ranks, self.ranks[peer], describe(tensor))
        here, there = self.host_of[self.rank], self.host_of[peer]
        if self.pacer is None or here == there:
            return [start([tensor], peer, 0)]
        due = Due(self.pacer.reserve(here, there, nbytes(tensor)) if call is dist.isend else 0.0)
        return [
            start([due.tensor], peer, 0),
            start([tensor], peer, 0),
            due,
        ]  # its due time travels ahead of the message

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
        """`length` elements to receive into, kept from call to call.

        Fresh memory costs a page fault every 4 KiB.
        """
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


def _dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself if its elements lie side by side, else new memory for them."""
    dense = tensor.is_contiguous()
    return tensor if dense else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def copy_back(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bring what arrived in `dense` into `tensor`, for which it stood in, unless that is its memory."""
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)  # writing into a parameter is allowed here, as in torch's collectives
