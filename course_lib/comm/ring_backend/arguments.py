"""What is handed to a group is checked in the caller's thread, before anything is queued.

A collective that fails in the group's thread leaves ranks behind that no longer agree, so the group is of no more use.
What one rank can see alone is therefore refused where it calls, and the group goes on. What takes two ranks to see, for
example another length on another rank, the board compares when the collective begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.messages import describe
from course_lib.comm.ops import check_op, combines


class CheckingGroup(dist.ProcessGroup):
    """The checks. Each raises ValueError, which names the (global) rank and the collective."""

    def _where(self, name: str) -> str:
        return f"rank {dist.get_global_rank(self, self.rank())}: {name}"

    def _check(self, name: str, *tensors: torch.Tensor) -> None:
        """At least one, all of them dense and on the CPU."""
        if not tensors:
            raise ValueError(f"{self._where(name)}(tensors): expected at least one tensor, got an empty list")
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise ValueError(
                    f'{self._where(name)}(tensor): backend "ring" takes dense tensors on the CPU, got '
                    f"{tensor.layout} on {tensor.device}; move it with .cpu(), to_dense(), or use another backend"
                )

    def _check_written(self, name: str, *tensors: torch.Tensor) -> None:
        """Results go there, so each element needs memory of its own."""
        self._check(name, *tensors)
        for tensor in tensors:
            if tensor.is_contiguous():
                continue
            if any(stride == 0 and n > 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True)):
                raise ValueError(
                    f"{self._where(name)}(tensor): the result is written there, but its elements share memory: shape "
                    f"{tuple(tensor.shape)}, strides {tensor.stride()}, as after expand(); hand over tensor.clone()"
                )

    def _check_contiguous(self, name: str, tensors: list[torch.Tensor]) -> None:
        self._check(name, *tensors)
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{self._where(name)}(tensor): expected a contiguous tensor, got strides {tensor.stride()}; "
                    "receive into a new tensor and copy it"
                )

    def _check_count(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"{self._where(name)}(tensor_list): expected {self.size()} tensors, one for each rank of the group, "
                f"got {len(tensors)}"
            )

    def _check_list(self, name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
        """One for each rank, all with the shape and dtype of `like`, this rank's own tensor."""
        self._check_count(name, tensors)
        for i, tensor in enumerate(tensors):
            self._check_like(f"{name}(tensor_list)", f"tensor {i}", tensor, like)

    def _check_like(self, name: str, what: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"{self._where(name)}: expected {what} with shape {tuple(like.shape)} and {like.dtype}, as this rank's "
                f"other tensor has, got {tuple(tensor.shape)} and {tensor.dtype}"
            )

    def _check_chunk(self, argument: str, chunk: torch.Tensor, whole: torch.Tensor) -> None:
        if whole.numel() != self.size() * chunk.numel() or whole.dtype != chunk.dtype:
            raise ValueError(
                f"{self._where(argument)}: expected the same dtype, and one tensor {self.size()} times as "
                f"long as the other; got {describe(whole)} and {describe(chunk)}; pad it, or use all_reduce"
            )

    def _check_root(self, name: str, root: int) -> None:
        if not 0 <= root < self.size():
            raise ValueError(
                f"{self._where(name)}(root): expected a rank of the group, 0…{self.size() - 1}, got {root}"
            )

    def _op(self, name: str, op: Any, *tensors: torch.Tensor) -> str:
        """The course's name for torch's `op`, after making sure that all `tensors` can be reduced with it."""
        try:
            for tensor in tensors:
                found = check_op(op, tensor)
                if not combines(found, tensor.dtype):
                    raise ValueError(
                        f"op: torch cannot make the {found} of {tensor.dtype} values; "
                        "convert the tensor to another dtype first"
                    )
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{self._where(name)}: {error}") from None
        return found
