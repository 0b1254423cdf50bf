"""Whose backward runs: a forward leaves a mark on its outputs, and the backward that comes by there finds it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from course_lib.parallel.ddp.unused import tensors_in


class Marks:
    """The marks of one wrapper's forwards: were they inside `no_sync`?"""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._found: tuple[int, bool] | None = None  # autograd's number of the backward that runs, and sync

    @property
    def local(self) -> bool:
        """The backward that runs is that of a forward inside no_sync: its gradients stay this rank's own."""
        return self._found is not None and not self._found[1]

    def leave(self, outputs: Any, sync: bool, needed: bool) -> None:
        """On the outputs of a forward. Raises TypeError if there is no tensor in them and the marks are `needed`."""
        self._found = None  # of a backward that raised
        tensors = list(tensors_in(outputs))
        if not tensors and outputs is not None and needed:
            raise TypeError(
                f"rank {self._rank}: forward: expected a tensor, or tuples, lists, dicts and dataclasses of tensors, "
                f"got {type(outputs).__name__}, in which no tensor is found. Without them neither no_sync nor "
                "find_unused_parameters can know what belongs to this forward"
            )
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._find, sync))

    def _find(self, sync: bool, _: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if self._found == (backward, not sync):
            raise RuntimeError(
                f"rank {self._rank}: one backward of two forwards, one of them inside no_sync. Are its gradients to be "
                "averaged? Put both forwards inside `with model.no_sync():`, or both outside"
            )
        if self._found != (backward, sync):
            self._found = backward, sync
            Variable._execution_engine.queue_callback(self._forget)

    def _forget(self) -> None:
        self._found = None
