"""Which parameters a loss can reach: found from the graph that forward has built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from course_lib.comm.communicator import Communicator


def unused_parameters(outputs: Any, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those of `parameters` that no path of the graph joins to a tensor in `outputs`.

    Backward ends in a node for each parameter it reaches; those nodes are looked for, from the outputs on.
    """
    tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    reached = {tensor for tensor in tensors if tensor.grad_fn is None}  # a parameter handed through
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            reached.add(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return [parameter for parameter in parameters if parameter not in reached]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, or in tuples, lists, dicts and dataclasses to any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name))


def used_by_nobody(
    comm: Communicator, parameters: list[nn.Parameter], without: Iterable[nn.Parameter]
) -> list[nn.Parameter]:
    """Those of `parameters` that every rank has among `without`. One all-reduce of a byte for each parameter."""
    without = set(without)
    used = torch.tensor([p not in without for p in parameters], dtype=torch.uint8, device=comm.device)
    comm.all_reduce(used, "max")
    return [
        parameter for parameter, by_somebody in zip(parameters, used.tolist(), strict=True) if not by_somebody
    ]
