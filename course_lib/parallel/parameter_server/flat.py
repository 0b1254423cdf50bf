"""A module's trainable parameters as one vector, and what every kind of server does at its start.

Ten thousand small messages cost ten thousand latencies, so what travels is flat: all parameters, or all
gradients, side by side, in the order of `module.parameters()`. A tied parameter is there once, a frozen one
not at all.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from course_lib.comm.communicator import Communicator

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to a torch optimizer: `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`."""


class PeerLost(ConnectionError):
    """The connection to another rank is closed: its process has ended."""


class FlatParameters:
    """The trainable parameters of `module`: `tensors` one by one, `bounds` where each lies in the vector,
    `numel`, `dtype`.

    Raises ValueError where there is nothing to train, or where the parameters are of several dtypes (one
    vector has one).
    """

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        where = f"rank {comm.global_rank}: module: "
        if not isinstance(module, nn.Module):
            raise TypeError(f"{where}expected an nn.Module, got {type(module).__name__}")
        everything = list(module.parameters())
        self.tensors = [parameter for parameter in everything if parameter.requires_grad]
        if sum(parameter.numel() for parameter in self.tensors) == 0:
            raise ValueError(
                f"{where}expected something to train, got {len(everything)} parameters, none with elements "
                "and "
                "requires_grad=True; a server has nothing to update"
            )
        dtypes = sorted({str(parameter.dtype) for parameter in self.tensors})
        if len(dtypes) > 1:
            raise ValueError(
                f"{where}expected parameters of one dtype, since they travel as one vector, got "
                f"{' and '.join(dtypes)}; "
                "convert the module with module.to(dtype)"
            )
        for parameter in self.tensors:
            comm.check_tensor("module's parameters", parameter)
        self.dtype, self.device = self.tensors[0].dtype, self.tensors[0].device
        ends = torch.tensor([0, *(parameter.numel() for parameter in self.tensors)]).cumsum(0).tolist()
        self.bounds = list(pairwise(ends))
        self.numel: int = ends[-1]
        self._gradients = self.empty()

    def empty(self) -> torch.Tensor:
        """Room for the vector: (numel,)."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def read(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of the parameters: (numel,). In new memory, or in `out`."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.tensors], out=out)

    def write(self, flat: torch.Tensor) -> None:
        """Set the parameters to the values in `flat`: (numel,)."""
        for parameter, (start, stop) in zip(self.tensors, self.bounds, strict=True):
            parameter.detach().copy_(flat[start:stop].view(parameter.shape))

    def take_gradients(self) -> tuple[torch.Tensor, list[bool]]:
        """(gradients side by side, which parameters have one), and clear them. Where there is none, zeros.

        A parameter that took no part in the loss has no gradient, which is not the same as a gradient of
        zero: an optimizer leaves the one alone and lets weight decay shrink the other.
        """
        flat, used = self.empty(), [parameter.grad is not None for parameter in self.tensors]
        for parameter, (start, stop) in zip(self.tensors, self.bounds, strict=True):
            gradient = parameter.grad
            flat[start:stop] = 0 if gradient is None else gradient.detach().to_dense().reshape(-1)
            parameter.grad = None
        return flat, used

    def set_gradients(self, flat: torch.Tensor, used: Sequence[bool]) -> None:
        """The opposite: give every parameter that was used its part of `flat` as its gradient."""
        for parameter, (start, stop), was_used in zip(self.tensors, self.bounds, used, strict=True):
            parameter.grad = flat[start:stop].view(parameter.shape) if was_used else None


def check_server(comm: Communicator, server: Any) -> None:
    if isinstance(server, bool) or not isinstance(server, int) or not 0 <= server < comm.world_size:
        raise ValueError(
            f"rank {comm.global_rank}: server: expected a rank of this communicator, "
            f"0…{comm.world_size - 1}, got {server!r}"
        )


def make_optimizer(
    comm: Communicator, optimizer: MakeOptimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """`optimizer(parameters)`, checked."""
    made = optimizer(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"rank {comm.global_rank}: optimizer: expected a function from parameters to a torch optimizer, "
            "which returned "
            f"{type(made).__name__}; write lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    return made


def check_optimizer(comm: Communicator, optimizer: Any) -> None:
    """On every rank, so that a mistake is reported where it was made and not by the server alone."""
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            f"rank {comm.global_rank}: optimizer: expected a function from parameters to a torch optimizer, "
            "because only "
            f"servers build one, got {type(optimizer).__name__}; write lambda parameters: "
            "torch.optim.SGD(parameters, lr=0.1)"
        )


def copy_from(comm: Communicator, module: nn.Module, root: int) -> None:
    """Give every rank rank `root`'s parameters and buffers, frozen ones too: all begin with the same model.

    Raises ValueError on a rank whose model is another one.
    """
    tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
    trainable = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    layout = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    shape = [
        len(tensors),
        sum(tensor.numel() for tensor in tensors),
        sum(trainable),
        zlib.crc32(layout.encode()),
    ]
    if comm.rank == root:
        for to in others(comm):
            with reaching(comm, "worker", to):
                comm.send(torch.tensor(shape, device=comm.device), to)
                for tensor in tensors:
                    comm.send(tensor, to)
        return
    roots = torch.empty(len(shape), dtype=torch.int64, device=comm.device)
    with reaching(comm, "server", root):
        comm.recv(roots, root)
        if roots.tolist() != shape:
            words = "{} tensors with {} elements, {} of them trainable, layout {:08x}"
            raise ValueError(
                f"rank {comm.global_rank}: module: expected rank {comm.ranks[root]}'s model, "
                f"{words.format(*roots.tolist())}; "
                f"got {words.format(*shape)}. Build the same module on every rank"
            )
        for tensor in tensors:
            comm.recv(tensor, root)


def number(loss: float | torch.Tensor) -> float:
    return loss.item() if isinstance(loss, torch.Tensor) else float(loss)


def others(comm: Communicator) -> list[int]:
    return [rank for rank in range(comm.world_size) if rank != comm.rank]


@contextmanager
def reaching(comm: Communicator, role: str, peer: int) -> Iterator[None]:
    """Messages to or from rank `peer` are inside: if its process ends, PeerLost says whose it was and what it
    did.
    """
    try:
        yield
    except RuntimeError as error:  # what gloo and NCCL raise
        if not re.search(
            r"connection (closed|reset)|broken pipe|closed by peer|remote process", str(error), re.I
        ):
            raise
        raise PeerLost(
            f"rank {comm.global_rank}: the {role}, rank {comm.ranks[peer]}, is gone (connection closed by "
            "peer): its process "
            "has ended. Look for its own error first"
        ) from error
