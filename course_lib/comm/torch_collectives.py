"""torch's own collectives, written into the ledger and onto the board.

Nobody can look inside them, so their rows are marked `exact=False` and hold the traffic of a
bandwidth-optimal algorithm: a ring for all-reduce, reduce-scatter and all-gather, a chain for broadcast. This
is also the one place that meets torch's renamed collectives and the backends that cannot average.

On the backend "ring" (`ring_backend`) "torch's own" are the course's, and write their own rows: an exact one for each
message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.messages import Handle, Messenger, copy_back, describe
from course_lib.comm.ops import AVG, SUM, average_, check_op, torch_op
from course_lib.plan import traffic

RING = "ring"  # the name of the course's own backend

# Renamed in torch 2.14, where the old names warn; before, the old names are the only ones.
torch_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
torch_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCollectives(Messenger):
    """The part of the Communicator that calls torch's collectives.

    With `async_op=True` each returns a handle at once.
    """

    def barrier(self) -> None:
        """Return when all ranks of this communicator have come here."""
        devices = [self.device.index or 0] if self.device.type == "cuda" else None
        call = lambda: dist.barrier(self.group, async_op=True, device_ids=devices)
        self._collective("barrier", "", call, traffic.Bytes(0, 0), 0)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, async_op: bool = False) -> Handle | None:
        """Copy rank `root`'s `tensor` into every rank's, in place."""
        self.check_tensor("broadcast(tensor)", tensor)
        self.check_root("broadcast(root)", root)
        dense = tensor.detach().contiguous()
        call = lambda: dist.broadcast(dense, group=self.group, group_src=root, async_op=True)
        counts = traffic.chain_broadcast_bytes(*self._sizes(tensor), root)[self.rank]
        messages = traffic.chain_broadcast_messages(*self._sizes(tensor), root)[self.rank]
        signature = f"{describe(tensor)} from {root}"
        finish = lambda: copy_back(dense, tensor)
        return self._collective("broadcast", signature, call, counts, messages, finish, async_op)

    def all_reduce(self, tensor: torch.Tensor, op: Any = SUM, async_op: bool = False) -> Handle | None:
        """Reduce `tensor` over all ranks, in place. `op`: "sum", "avg", "max", "min", "product"."""
        self.check_tensor("all_reduce(tensor)", tensor)
        name, dense = check_op(op, tensor), tensor.detach().contiguous()
        call = lambda: dist.all_reduce(dense, self._torch_op(name), self.group, async_op=True)
        counts = traffic.ring_all_reduce_bytes(*self._sizes(tensor))[self.rank]
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
        name, dense, whole = check_op(op, tensor), out.detach().contiguous(), tensor.detach().contiguous()
        flat = (dense.view(-1), whole.view(-1))
        call = lambda: torch_reduce_scatter(*flat, self._torch_op(name), self.group, async_op=True)
        counts = traffic.ring_reduce_scatter_bytes(*self._sizes(tensor))[self.rank]
        signature, messages = f"{describe(tensor)} {name}", self.world_size - 1
        finish = lambda: copy_back(self._averaged(dense, name), out)
        return self._collective("reduce_scatter", signature, call, counts, messages, finish, async_op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, async_op: bool = False) -> Handle | None:
        """Every rank gives `tensor`; all get them side by side, in rank order, in `out`."""
        self.check_tensor("all_gather(out)", out)
        self.check_tensor("all_gather(tensor)", tensor)
        self._check_chunks("all_gather(out, tensor)", whole=out, chunk=tensor)
        dense, chunk = out.detach().contiguous(), tensor.detach().contiguous()
        call = lambda: torch_all_gather(dense.view(-1), chunk.view(-1), self.group, async_op=True)
        counts = traffic.ring_all_gather_bytes(*self._sizes(out))[self.rank]
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
        """Start one of torch's collectives; its end is noted when it ends, not when somebody waits."""
        ring = self.backend == RING
        handle = Handle(self, op, None, None if ring else (*counts, messages), finish, exact=False)
        with nullcontext() if ring else self.board.collective(op, self.ranks, signature):
            with self.board.wait(op):
                handle.works = [call()]
            if not async_op:
                handle.wait()
                return None
        if self.device.type == "cpu":
            with suppress(RuntimeError):  # some of gloo's have no future: then the end is noted by `wait`
                handle.works[0].get_future().add_done_callback(lambda _: handle.note_end())
        return handle

    def _torch_op(self, name: str) -> Any:
        """NCCL can average. Elsewhere the ranks add, and `_averaged` divides."""
        return torch_op(SUM if name == AVG and self.backend != "nccl" else name)

    def _averaged(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if self.backend != "nccl":
            average_(name, tensor, self.world_size)
        return tensor

    def _sizes(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        return self.world_size, tensor.numel(), tensor.element_size()

    def _check_chunks(self, argument: str, whole: torch.Tensor, chunk: torch.Tensor) -> None:
        if whole.numel() != self.world_size * chunk.numel() or whole.dtype != chunk.dtype:
            raise ValueError(
                f"rank {self.global_rank}: {argument}: expected the same dtype, and one tensor {self.world_size} times "
                f"as long as the other; got {describe(whole)} and {describe(chunk)}"
            )
