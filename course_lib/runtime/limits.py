"""Limits that a laptop does not have by itself: a rank's memory, and a stage's compute time.

Memory: Linux counts a process's private memory (VmData) and refuses what would pass RLIMIT_DATA; torch's allocator
then raises as a full GPU does. Compute time: on two cores, four stages that compute at once slow each other down, so a
pipeline's schedule cannot be seen. A paced stage does its real arithmetic and then waits until its modelled time is
over. Whatever is measured with it must say "paced".
"""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch


class MemoryLimit:
    """From now on this process may allocate `limit_bytes` more than it has; on a GPU, so many bytes of it in all."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.limit_bytes, self.device = limit_bytes, device
        if device.type == "cuda":
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / whole), device)
        elif sys.platform == "linux":
            import resource

            self._end = vm_data() + limit_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (self._end, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        else:
            raise OSError(
                f"memory_limit: this system ({sys.platform}) enforces no limit on a process's data; use Linux"
            )

    def explain(self, error: BaseException) -> str | None:
        """If `error` says that memory ran out: how much was asked for, and how much was left. Call it at once."""
        if self.device.type == "cuda" or not isinstance(error, (RuntimeError, MemoryError)):
            return None
        asked = re.search(r"allocate (\d+) bytes", str(error))
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            return None
        what = f"{int(asked[1]) / 1e6:,.1f} MB" if asked else "memory"
        left = max(0, self._end - vm_data()) / 1e6
        return f"tried to allocate {what} with {left:,.1f} MB left of the limit of {self.limit_bytes / 1e6:,.1f} MB"


def vm_data() -> int:
    """This process's private, writable memory in bytes, as Linux counts it for RLIMIT_DATA."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line VmData")


class PacedStage(torch.nn.Module):
    """`module` with a modelled compute time: a forward takes at least `forward_s`, a backward `backward_s` seconds.

    The arithmetic is real, and so are all values and gradients; only the time is stretched. If the arithmetic takes
    longer than the modelled time, nothing is added: `late_s` then says by how much, so that a measurement can tell.
    """

    def __init__(self, module: torch.nn.Module, forward_s: float, backward_s: float) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
        for name, value in (("forward_s", forward_s), ("backward_s", backward_s)):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ValueError(f"{name}: expected seconds, 0 or more, got {value!r}")
        self.module, self.forward_s, self.backward_s, self.late_s = module, forward_s, backward_s, 0.0
        self._backward_began = 0.0
        self.register_full_backward_pre_hook(self._begin_backward)
        self.register_full_backward_hook(self._end_backward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        out = self.module(*args, **kwargs)
        self._wait(began, self.forward_s)
        return out

    def _begin_backward(self, *_: Any) -> None:
        self._backward_began = time.monotonic()

    def _end_backward(self, *_: Any) -> None:
        self._wait(self._backward_began, self.backward_s)

    def _wait(self, began: float, seconds: float) -> None:
        rest = began + seconds - time.monotonic()
        self.late_s = max(self.late_s, -rest)
        time.sleep(max(0.0, rest))


def paced(module: torch.nn.Module, seconds: float, backward_s: float | None = None) -> PacedStage:
    """`module` as a PacedStage: `seconds` for a forward, and `backward_s` (if not given: twice that) for a backward.

    Twice, because a backward computes two products of the forward's size: for the input and for the weights.
    """
    twice = (
        2 * seconds if isinstance(seconds, (int, float)) else seconds
    )  # else PacedStage says what is wrong
    return PacedStage(module, seconds, twice if backward_s is None else backward_s)
