"""The two rungs that wait until backward is over: nothing is hidden, and little can go wrong."""

from __future__ import annotations

from abc import abstractmethod

import torch

from course_lib.parallel.ddp.base import DDP


class AfterBackward(DDP):
    """A rung that averages all gradients at the end."""

    @abstractmethod
    def average(self, gradients: list[torch.Tensor]) -> None:
        """Over the ranks, in place."""

    def average_gradients(self) -> None:
        for parameter in self.parameters_trained:
            if parameter.grad is None:  # not used in this forward: it adds nothing
                parameter.grad = torch.zeros_like(parameter)
        self.average([parameter.grad for parameter in self.parameters_trained if parameter.grad is not None])

    def average_zeros(self) -> None:
        self.average([torch.zeros_like(parameter) for parameter in self.parameters_trained])


class PerParameterDDP(AfterBackward):
    """After backward, one all-reduce for each parameter: P times the fixed cost of a message, nothing overlapped."""

    def average(self, gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            self.comm.all_reduce(gradient.div_(self.num_contributing))


class FlatDDP(AfterBackward):
    """After backward, the gradients side by side in one buffer for each dtype, and one all-reduce of it.

    The fixed cost is paid once. Takes the memory of all gradients a second time while it runs.
    """

    def average(self, gradients: list[torch.Tensor]) -> None:
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            group = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in group]).div_(self.num_contributing)
            self.comm.all_reduce(flat)
            for gradient, values in zip(group, flat.split([g.numel() for g in group]), strict=True):
                gradient.copy_(values.view(gradient.shape))
