"""Copies of a module that share its code and have parameters and buffers of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from course_lib.parallel.data_parallel import flows as kinds
from course_lib.parallel.data_parallel.wires import Broadcast, Wires


def replicate(module: nn.Module, wires: Wires) -> list[nn.Module]:
    """One copy of `module` for each place of `wires`.

    A copy's parameters are no leaves but the outputs of `Broadcast`, so that what backward gives them reaches the
    module's own. Parameters and submodules used in two places stay shared within a copy. The buffers of copy 0 are
    the module's own, and what forward writes into them lasts; those of the other copies are forgotten with the
    copy. So is every attribute that forward assigns: each copy is a new object.
    """
    parameters, buffers = list(module.parameters()), list(module.buffers())
    copies = Broadcast.apply(wires, *parameters) if parameters else ()
    replicas = []
    for i, place in enumerate(wires.places):
        mine = list(copies[i * len(parameters) : (i + 1) * len(parameters)])
        mine += wires.carry(kinds.BUFFERS, buffers, wires.places[0], place)
        if wires.flows:
            _watch_backward(mine[: len(parameters)], wires.flows, i)
        originals = [*parameters, *buffers]
        swap = {id(original): copy for original, copy in zip(originals, mine, strict=True)}
        replicas.append(_copy_with(module, swap))
    return replicas


def _copy_with(module: nn.Module, swap: dict[int, torch.Tensor]) -> nn.Module:
    """A copy of the module tree with the tensors that `swap` names by the id of the original."""
    twins = {original: _shell(original, swap) for original in module.modules()}
    for original, twin in twins.items():
        twin._modules = {
            name: None if child is None else twins[child] for name, child in original._modules.items()
        }
    return twins[module]


def _shell(module: nn.Module, swap: dict[int, torch.Tensor]) -> nn.Module:
    """A new object of the module's class: its attributes as they are, other parameters and buffers."""
    twin = nn.Module.__new__(type(module))
    twin.__dict__.update({name: _swapped(value, swap) for name, value in module.__dict__.items()})
    # Into the dictionaries themselves: as attributes, tensors that are no Parameter would be refused there.
    twin._parameters = {name: swap.get(id(p)) for name, p in module._parameters.items()}  # type: ignore[misc]
    twin._buffers = {name: swap.get(id(b)) for name, b in module._buffers.items()}
    return twin


def _swapped(attribute: Any, swap: dict[int, torch.Tensor]) -> Any:
    """A plain attribute may hold parameters a second time, as the list of an LSTM's weights does."""
    if isinstance(attribute, list) and any(id(item) in swap for item in attribute):
        return [swap.get(id(item), item) for item in attribute]
    return swap.get(id(attribute), attribute)


def _watch_backward(parameters: list[torch.Tensor], flows: kinds.Flows, replica: int) -> None:
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(lambda _: flows.backward_goes_on(replica))
