"""Broadcasts of what is no single tensor: bytes whose length only the root knows, and many small tensors at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from course_lib.comm.communicator import Communicator


def broadcast_bytes(comm: Communicator, data: bytes = b"", root: int = 0) -> bytes:
    """Rank `root`'s `data`, on every rank; what the others give is not looked at.

    Blocking. Two broadcasts: the length (8 bytes), then the bytes.
    """
    length = torch.tensor([len(data)], dtype=torch.int64, device=comm.device)
    comm.broadcast(length, root)
    content = torch.empty(int(length), dtype=torch.uint8, device=comm.device)
    if comm.rank == root and data:
        content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast(content, root)
    return data if comm.rank == root else content.cpu().numpy().tobytes()


@torch.no_grad()
def broadcast_tensors(comm: Communicator, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Rank `root`'s values in every rank's `tensors`, in place: all bytes, whatever their dtype, in one broadcast.

    tensors: on the Communicator's device, of the same shapes and dtypes on every rank. Blocking. A model has many small
    tensors, and a message costs its fixed time however small it is. Autograd is not told: a graph that kept one of them
    for its backward finds the new values there.
    """
    # The widest numbers first, so that each tensor begins at a multiple of its item's size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.element_size())
    if not tensors:
        return
    flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    comm.broadcast(flat, root)
    if comm.rank != root:
        for tensor, values in zip(tensors, flat.split([t.nbytes for t in tensors]), strict=True):
            # Through .data: the graph of an earlier forward may have kept a buffer (BatchNorm's does, and does not
            # read it), and its backward would refuse.
            tensor.data.copy_(values.view(tensor.dtype).view(tensor.shape))
