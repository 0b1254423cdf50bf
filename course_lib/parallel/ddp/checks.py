"""What a wrapper can take, and what is said about the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from course_lib.comm.communicator import Communicator


def check_wrapping(module: Any, comm: Any, wrappers: tuple[type, ...]) -> None:
    """Whether `module` can be wrapped on this rank; `wrappers` average already. Raises TypeError or ValueError."""
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm: expected this rank's Communicator, got {type(comm).__name__}")
    rank, device = comm.global_rank, comm.device
    if not isinstance(module, nn.Module):
        raise TypeError(f"rank {rank}: module: expected an nn.Module, got {type(module).__name__}")
    for part in module.modules():
        if isinstance(part, wrappers):
            raise ValueError(
                f"rank {rank}: module: expected a plain module; {type(part).__name__} in it averages already"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"rank {rank}: module: expected a parameter with requires_grad=True; there is none to train"
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"rank {rank}: module: {name} has no shape yet; run one batch through it first")
        if tensor.device.type != device.type:
            raise ValueError(
                f"rank {rank}: module: expected its parameters and buffers on {device}, this rank's device, but {name} "
                f"is on {tensor.device}; call module.to(comm.device) before you wrap it"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"rank {rank}: module: expected dense tensors, but {name} is {tensor.layout}; densify it"
            )
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(
                f"rank {rank}: module: {name} is expanded: several of its elements are one in memory, and cannot be "
                "overwritten with rank 0's; clone() it first"
            )


def check_switches(**switches: Any) -> None:
    """Raises TypeError for an option that is no bool."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r:.60}")


def check_gradient(comm: Communicator, name: str, parameter: nn.Parameter) -> None:
    """Whether the gradient that has just come can be averaged. Raises NotImplementedError."""
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.is_sparse:
        raise NotImplementedError(
            f"rank {comm.global_rank}: the gradient of {name} is sparse, and only dense ones are averaged; build the "
            "layer with sparse=False"
        )
    if gradient.requires_grad:
        raise NotImplementedError(
            f"rank {comm.global_rank}: backward(create_graph=True): the gradient of {name} has a gradient of its own, "
            "which averaging would cut off. For a penalty on gradients, call torch.autograd.grad(..., "
            "create_graph=True), and then backward() without it"
        )


def no_gradient(rank: int, missing: list[str], find_unused_parameters: bool) -> str:
    """What to say when a backward ends and the parameters `missing` have no gradient."""
    text = f"rank {rank}: backward gave no gradient to {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}: "
    if find_unused_parameters:
        return text + (
            "forward returned a tensor that depends on it, but this backward did not come from that tensor. Return "
            "only what the loss uses; add up several losses, and call backward once"
        )
    return text + (
        "forward left it out, or its result does not reach the loss. Other ranks may wait for it. If that is meant, "
        "wrap the model with find_unused_parameters=True. (With torch.utils.checkpoint, give it use_reentrant=False)"
    )
