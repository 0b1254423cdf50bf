"""The wrapper's hooks on its parameters: one wrapper for each parameter, and a new one takes the old one's place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from course_lib.parallel.ddp.base import DDP


class Hooks:
    """Has autograd call `wrapper.on_gradient(parameter)` for each trained parameter, until the wrapper is replaced.

    Wrapping the same module again replaces the wrapper. Raises ValueError for a parameter that another module's wrapper
    averages: its gradient would be divided twice.
    """

    def __init__(self, wrapper: DDP) -> None:
        self.active, self._handles = True, []
        for parameter in wrapper.parameters_trained:
            before = _wrapper_of(parameter, type(self))
            if before is not None and before.module is not wrapper.module:
                raise ValueError(
                    f"rank {wrapper.comm.global_rank}: module: {wrapper._names[parameter]} is averaged by another "
                    "wrapper already; put both models into one module, and wrap that"
                )
            if before is not None:
                before._hooks.remove()
        for parameter in wrapper.parameters_trained:
            handle: Any = parameter.register_post_accumulate_grad_hook(wrapper.on_gradient)
            self._handles.append(handle)

    def remove(self) -> None:
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _wrapper_of(parameter: nn.Parameter, kind: type) -> DDP | None:
    """The wrapper whose method is among the parameter's hooks; torch keeps them in an attribute of the tensor."""
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        owner = getattr(hook, "__self__", None)
        if isinstance(getattr(owner, "_hooks", None), kind):
            return owner
    return None
