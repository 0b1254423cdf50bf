"""Scatter, parallel apply, gather: what happens to the data in one forward."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from course_lib.parallel.data_parallel.nested import leaves, nested_map
from course_lib.parallel.data_parallel.wires import Gather, Place, Scatter, Wires
from course_lib.plan.partition import chunk_sizes


class Arguments(NamedTuple):
    """What a module is called with."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


class ReplicaError(RuntimeError):
    """A replica's forward raised. `replica`: its number; `device`: where; `__cause__`: what it raised."""

    def __init__(self, message: str, replica: int, device: torch.device) -> None:
        super().__init__(message)
        self.replica, self.device = replica, device


# --- scatter


def scatter(arguments: Any, wires: Wires, dim: int = 0) -> list[Any]:
    """`arguments` for each replica: every tensor inside cut along `dim`, all else handed to each as it is.

    The slices differ by one in length at most, the first ones longer. Raises ValueError if there is no tensor, if
    tensors disagree in the length of `dim`, or if there are fewer samples than replicas.
    """
    tensors = [(where, leaf) for where, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
    sizes = chunk_sizes(_batch_size(tensors, dim, len(wires.places)), len(wires.places))
    slices = {id(tensor): Scatter.apply(wires, dim, sizes, tensor) for _, tensor in tensors}
    return [
        nested_map(lambda _, leaf, i=i: slices[id(leaf)][i] if id(leaf) in slices else leaf, arguments)
        for i in range(len(wires.places))
    ]


def _batch_size(tensors: list[tuple[str, torch.Tensor]], dim: int, num_replicas: int) -> int:
    if not tensors:
        raise ValueError(
            "scatter: there is no tensor to cut among the arguments; tensors are found in tuples, lists and dicts, "
            "but not inside other objects: pass the tensors themselves"
        )
    sizes = {where: tensor.size(check_dim(where, tensor, dim)) for where, tensor in tensors}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{where} has {size}" for where, size in sizes.items())
        raise ValueError(
            f"scatter: every tensor is cut along dimension {dim}, so all need the same length there; {found}. "
            "What belongs to no sample (a mask, a scale) goes into a buffer of the module, or is expanded first"
        )
    where, size = next(iter(sizes.items()))
    if size < num_replicas:
        raise ValueError(
            f"scatter: {where} has {size} samples along dimension {dim} for {num_replicas} replicas, and each needs "
            "one at least: take a larger batch or fewer devices, or drop the short last batch (drop_last=True)"
        )
    return size


def check_dim(where: str, tensor: torch.Tensor, dim: int) -> int:
    if -tensor.dim() <= dim < tensor.dim():
        return dim
    hint = "; pass a single number as a number, not as a tensor" if tensor.dim() == 0 else ""
    raise ValueError(f"{where}: dim={dim} does not exist in a tensor of shape {tuple(tensor.shape)}{hint}")


# --- parallel apply


def parallel_apply(replicas: Sequence[nn.Module], arguments: Sequence[Arguments], wires: Wires) -> list[Any]:
    """Call each replica with its arguments in a thread of its own; return the outputs in the replicas' order.

    The threads take over what torch keeps for each thread: grad mode, inference mode, autocast, the current stream.
    Raises ReplicaError when all have ended and one had raised.
    """
    outputs: list[Any] = [None] * len(replicas)
    errors: dict[int, Exception] = {}

    def work(i: int, modes: Callable[[], Any]) -> None:
        span = wires.flows.span("forward", i) if wires.flows else nullcontext()
        try:
            with modes(), span:
                outputs[i] = replicas[i](*arguments[i].inputs, **arguments[i].kwargs)
        except Exception as error:
            errors[i] = error

    threads = [
        threading.Thread(target=work, args=(place.number, _modes_of_caller(place.device)), daemon=True)
        for place in wires.places
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        _raise_first(errors, wires)
    return outputs


def _modes_of_caller(device: torch.device) -> Callable[[], Any]:
    """A context for a replica's thread, in which torch behaves as it does here and now."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    cache = torch.is_autocast_cache_enabled()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def modes() -> Iterator[None]:
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast(device.type, autocast[1], autocast[0], cache))
            yield

    return modes


def _raise_first(errors: dict[int, Exception], wires: Wires) -> None:
    first = min(errors)
    error, device = errors[first], wires.places[first].device
    others = sorted(set(errors) - {first})
    too = f" (so did {', '.join(map(str, others))})" if others else ""
    message = (
        f"replica {first} of {len(wires.places)} on {device} raised{too}: {type(error).__name__}: {error}"
    )
    raise ReplicaError(message, first, device) from error


# --- gather


def gather(outputs: Sequence[Any], wires: Wires, target: Place, dim: int = 0) -> Any:
    """The replicas' outputs as one: tensors side by side along `dim` on `target`, structure as in each of them.

    None stays None. Scalars become a vector with an element for each replica, and a warning says so. Raises ValueError
    where the outputs do not fit together, TypeError for an output that is no tensor.
    """

    def join(where: str, *parts: Any) -> Any:
        where = f"output{where}"
        if all(part is None for part in parts):
            return None
        if not all(isinstance(part, torch.Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise TypeError(f"gather: {where}: expected a tensor (or None) from every replica, got {kinds}")
        if all(part.dim() == 0 for part in parts):
            _warn_of_scalars(where, len(parts))
            return Gather.apply(wires, target, 0, *(part.unsqueeze(0) for part in parts))
        _check_shapes(where, parts, dim)
        return Gather.apply(wires, target, dim, *parts)

    return nested_map(join, *outputs)


def _check_shapes(where: str, parts: Sequence[torch.Tensor], dim: int) -> None:
    shapes = []
    for part in parts:
        shape = list(part.shape)
        shape[check_dim(f"gather: {where}", part, dim)] = -1
        shapes.append(shape)
    if any(shape != shapes[0] for shape in shapes):
        found = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(
            f"gather: {where}: the replicas' shapes may differ in dimension {dim} only, got {found}. Sequences that "
            "each replica pads to its own longest must be padded to the whole batch's instead"
        )


def _warn_of_scalars(where: str, num_replicas: int) -> None:
    warnings.warn(
        f"gather: was asked to gather along dimension 0, but {where} of every replica is a scalar; the result is a "
        f"vector of {num_replicas}. If each is the mean over a slice of the batch, their mean is the batch's only if "
        "all slices have the same length: return a value for each sample, or compute the loss outside",
        stacklevel=5,
    )
