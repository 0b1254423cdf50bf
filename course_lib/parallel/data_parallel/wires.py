"""The ways between the devices, each with its adjoint: the way that gradients take back.

    forward                                         backward
    Scatter    slices of the inputs go out          slices of their gradients come back, side by side
    Broadcast  the parameters go to every replica   the replicas' gradients come back and are added on device 0
    Gather     the replicas' outputs come together  slices of the gradient go out

A tensor that is already where it should be is passed on, not copied; that holds for replica 0, which therefore works on
the module's own memory. Between two replicas on one device it is copied, as between two devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from operator import add
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from course_lib.parallel.data_parallel import flows as kinds
from course_lib.parallel.data_parallel.flows import HOST, Flows, Move


class Place(NamedTuple):
    """Where a replica lives: its number and its device. Number HOST: a device without a replica."""

    number: int
    device: torch.device


class Wires:
    """The places of all replicas, and the one way by which a tensor gets from one to another.

    `flows`: where to count (None: nowhere).
    """

    def __init__(self, devices: Sequence[torch.device], flows: Flows | None = None) -> None:
        self.places = [Place(number, device) for number, device in enumerate(devices)]
        self.flows = flows

    def place_of(self, tensor: torch.Tensor) -> Place:
        """The first replica's place on the tensor's device."""
        here = (place for place in self.places if place.device == tensor.device)
        return next(here, Place(HOST, tensor.device))

    def carry(
        self, what: str, tensors: Sequence[torch.Tensor | None], source: Place, target: Place
    ) -> list[Any]:
        """The tensors at `target`, each as it was at `source`; None stays None."""
        if source.number == target.number:
            return list(tensors)
        start_s = self.flows.now() if self.flows else 0.0
        arrived = [None if t is None else t.to(target.device, copy=True) for t in tensors]
        if self.flows and (nbytes := sum(_nbytes(t) for t in arrived if t is not None)):
            self.flows.add(Move(what, source.number, target.number, nbytes, start_s, self.flows.now()))
        return arrived


class Scatter(Function):
    """`apply(wires, dim, sizes, tensor)` -> one slice for each replica, cut along `dim` into `sizes`."""

    @staticmethod
    def forward(ctx: Any, wires: Wires, dim: int, sizes: list[int], tensor: torch.Tensor) -> Any:
        ctx.wires, ctx.dim, ctx.source = wires, dim, wires.place_of(tensor)
        slices, own = list(tensor.split(sizes, dim)), ctx.source.number
        if tensor.requires_grad and own != HOST:
            # The slice that stays is a view, one of several of a tensor. Autograd forbids writing into such a one,
            # and a module may want to (`nn.ReLU(inplace=True)`).
            slices[own] = slices[own].clone()
        parts = zip(wires.places, slices, strict=True)
        return tuple(wires.carry(kinds.INPUTS, [part], ctx.source, place)[0] for place, part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        carry, source = ctx.wires.carry, ctx.source
        parts = zip(ctx.wires.places, grads, strict=True)
        arrived = [carry(kinds.INPUT_GRADIENTS, [grad], place, source)[0] for place, grad in parts]
        return None, None, None, torch.cat(arrived, ctx.dim)


class Broadcast(Function):
    """`apply(wires, *parameters)` -> all parameters for replica 0, then all for replica 1, …

    The adjoint of copying is adding: backward sums the replicas' gradients, always in the replicas' order, so that a
    second run gives the same bits. A parameter that no replica used gets no gradient, as without replicas.
    """

    @staticmethod
    def forward(ctx: Any, wires: Wires, *parameters: torch.Tensor) -> Any:
        ctx.wires = wires
        # Otherwise the gradient of an unused parameter would be zeros instead of None.
        ctx.set_materialize_grads(False)
        home = wires.places[0]
        copies = [wires.carry(kinds.PARAMETERS, parameters, home, place) for place in wires.places]
        frozen = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if not needed]
        ctx.mark_non_differentiable(*(replica[i] for replica in copies for i in frozen))
        return tuple(chain(*copies))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        wires: Wires = ctx.wires
        if wires.flows:
            wires.flows.backward_ended()
        home, length = wires.places[0], len(grads) // len(wires.places)
        arrived = [
            wires.carry(kinds.PARAMETER_GRADIENTS, grads[i * length : (i + 1) * length], place, home)
            for i, place in enumerate(wires.places)
        ]
        return None, *(_sum_of(column) for column in zip(*arrived, strict=True))


class Gather(Function):
    """`apply(wires, target, dim, *parts)` -> the replicas' `parts` at `target`, side by side along `dim`."""

    @staticmethod
    def forward(ctx: Any, wires: Wires, target: Place, dim: int, *parts: torch.Tensor) -> Any:
        ctx.wires, ctx.target, ctx.dim = wires, target, dim
        ctx.sizes = [part.size(dim) for part in parts]
        outputs = zip(wires.places, parts, strict=True)
        arrived = [wires.carry(kinds.OUTPUTS, [part], place, target)[0] for place, part in outputs]
        return torch.cat(arrived, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        wires: Wires = ctx.wires
        slices = []
        for place, part in zip(wires.places, grad.split(ctx.sizes, ctx.dim), strict=True):
            slices += wires.carry(kinds.OUTPUT_GRADIENTS, [part], ctx.target, place)
            if wires.flows:
                wires.flows.backward_began(place.number)
        return None, None, None, *slices


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:  # an embedding's gradient, for instance
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _sum_of(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return reduce(add, present) if present else None
