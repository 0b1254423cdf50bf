"""The module that wraps yours. It does nothing itself: it calls scatter, replicate, parallel_apply and gather."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from course_lib.parallel.data_parallel.flows import Flows
from course_lib.parallel.data_parallel.replicate import replicate
from course_lib.parallel.data_parallel.steps import Arguments, gather, parallel_apply, scatter
from course_lib.parallel.data_parallel.wires import Place, Wires


class DataParallel(nn.Module):
    """`module` on several devices at once: each gets a slice of the batch, the outputs come back as one.

    module: has its parameters and buffers on `device_ids[0]`; checked in each forward.
    device_ids: where its copies run: numbers of GPUs, names or torch.device; a device may come several times.
        None: all GPUs, or the CPU where there is none.
    output_device: one of `device_ids`, where the output is put. None: `device_ids[0]`.
    dim: the dimension of inputs and outputs that counts the samples.

    Called as the module itself is. Tensors in the arguments, also inside tuples, lists and dicts, are cut along
    `dim`; other arguments reach every copy. For a loss computed from the gathered output, the gradients are the
    unwrapped module's, except where a sample's output depends on its batch: BatchNorm normalises each slice by
    itself, and dropout draws other masks. Of the running statistics only copy 0's survive.

    `state_dict` has the module's own keys, so a checkpoint fits the module with and without the wrapper.
    `load_state_dict` takes these, and those with `module.` before them that `nn.DataParallel` writes.

    What differs from `nn.DataParallel`:
    * It cuts 5 samples for 4 devices into 2, 2, 1 and lets one device idle; here they are 2, 1, 1, 1. Here fewer
      samples than devices are an error.
    * It cuts tensors of different lengths each by itself, and drops the slices that have no partner; here that is
      an error.
    * Its copies have no `parameters()`; here they do.
    * It gives zeros as the gradient of an unused parameter; here that stays None.
    * Without a GPU it just calls the module.

    Raises ValueError or TypeError for devices that do not exist, an output_device that is not in the list, and a
    `dim` that is no integer.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module: expected an nn.Module, got {type(module).__name__}. Only the model is wrapped; the "
                "optimizer is made from model.parameters() and stays as it is"
            )
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"dim: expected the number of a dimension, got {dim!r}")
        self.module = module
        self.device_ids = _devices(device_ids)
        self.output_device = _output_device(output_device, self.device_ids)
        self.dim = dim
        self._flows: Flows | None = None
        self.register_load_state_dict_pre_hook(_accept_both_spellings)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._check_home()
        if not inputs and not kwargs:  # nothing to cut: one copy does it
            wires = Wires(self.device_ids[:1], self._flows)
            slices = [Arguments((), {})]
        else:
            wires = Wires(self.device_ids, self._flows)
            slices = scatter(Arguments(inputs, kwargs), wires, self.dim)
        replicas = replicate(self.module, wires)
        outputs = parallel_apply(replicas, slices, wires)
        target = Place(self.device_ids.index(self.output_device), self.output_device)
        return gather(outputs, wires, target, self.dim)

    @contextmanager
    def record(self) -> Iterator[Flows]:
        """Count and time what moves, in every forward inside the `with` and in the backward that belongs to it.

        with model.record() as flows:
            loss_fn(model(inputs), targets).backward()
        print(flows)
        """
        before, self._flows = self._flows, Flows(len(self.device_ids))
        try:
            yield self._flows
        finally:
            self._flows = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with the module's own keys."""
        return self.module.state_dict(*args, **kwargs)

    def _check_home(self) -> None:
        home = self.device_ids[0]
        for name, tensor in chain(self.module.named_parameters(), self.module.named_buffers()):
            if nn.parameter.is_lazy(tensor):
                raise ValueError(
                    f"module: {name} has no shape yet; call the module itself once, on one batch"
                )
            if tensor.device != home:
                raise ValueError(
                    f"module: expected its parameters and buffers on {home}, the first of device_ids, but {name} is on "
                    f"{tensor.device}: call module.to({str(home)!r})"
                )


def _accept_both_spellings(wrapper: nn.Module, state_dict: dict, prefix: str, *_: Any) -> None:
    """Before loading: give every key the `module.` that the wrapper's own hierarchy has, where it lacks it."""
    own = set(wrapper.state_dict())
    for key in [key for key in state_dict if key.startswith(prefix)]:
        rest = key.removeprefix(prefix)
        if rest in own or not rest.startswith("module."):
            state_dict[f"{prefix}module.{rest}"] = state_dict.pop(key)


def _devices(device_ids: Sequence[int | str | torch.device] | None) -> list[torch.device]:
    if device_ids is None:
        return [d for d in _existing() if d.type != "cpu"] or [torch.device("cpu")]
    if isinstance(device_ids, str | int | torch.device) or not device_ids:
        raise ValueError(f'device_ids: expected a list such as [0, 1] or ["cpu", "cpu"], got {device_ids!r}')
    return [_device(f"device_ids[{i}]", device) for i, device in enumerate(device_ids)]


def _device(argument: str, device: int | str | torch.device) -> torch.device:
    """The device with its number; for an accelerator named without one, the current one."""
    existing = _existing()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):  # no such name; a number where there is no accelerator
        found = None
    if found is not None and found.type == "cpu":
        return torch.device("cpu")
    if found is not None and found.index is None and any(d.type == found.type for d in existing):
        found = torch.device(found.type, torch.accelerator.current_device_index())
    if found not in existing:
        raise ValueError(
            f"{argument}: expected a device of this machine ({', '.join(map(str, existing))}), got {device!r}"
        )
    return found


def _existing() -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator else 0
    return [torch.device("cpu"), *(torch.device(accelerator.type, i) for i in range(count) if accelerator)]


def _output_device(
    output_device: int | str | torch.device | None, devices: list[torch.device]
) -> torch.device:
    if output_device is None:
        return devices[0]
    found = _device("output_device", output_device)
    if found not in devices:
        raise ValueError(
            f"output_device: expected one of device_ids ({', '.join(map(str, devices))}), got {output_device!r}"
        )
    return found
