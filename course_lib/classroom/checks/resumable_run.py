"""What runs in a process of the exercise on resuming: one start of the training, its diary, and its death.

Imports little: a check starts such a process a dozen times.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from course_lib.comm.communicator import Communicator

NUM_EPOCHS = 6
_NUM_STEPS, _WIDTH = 3, 512
_CUT_BYTES = 64 << 10  # half of the parameters
WATCHED = 2  # the epoch after which saving is disturbed
_CHANGES = {"os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "open"}


@dataclass(frozen=True)
class Fault:
    """When this start is killed. step: (epoch, step). cut: in the first large write after epoch `WATCHED`. change:
    before so many changes to files, counted from the end of that epoch."""

    step: tuple[int, int] | None = None
    cut: bool = False
    change: int | None = None


NO_FAULT = Fault()


class Diary:
    """Writes down what a start does. The process may be killed at any moment: a line is one write."""

    def __init__(self, path: str, folder: str, fault: Fault) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.folder, self.fault = folder, fault
        self._watching, self._num_changes = False, 0

    def line(self, **told: Any) -> None:
        os.write(self._file, (json.dumps(told) + "\n").encode())

    def watch(self, on: bool) -> None:
        self._watching = on
        if on and self.fault.cut:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and would raise OSError
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (_CUT_BYTES, resource.RLIM_INFINITY))

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Python's audit hook: called before a file is opened, renamed, removed."""
        if not self._watching or event not in _CHANGES:
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if not any(
            isinstance(arg, str | bytes | os.PathLike) and self.folder in os.fsdecode(arg) for arg in args
        ):
            return
        if self._num_changes == self.fault.change:
            os.kill(os.getpid(), signal.SIGKILL)
        self._num_changes += 1
        self.line(change=event)

    def fsync(self, real: Callable[[Any], None], file: Any) -> None:
        if self._watching:
            self.line(fsync=True)
        real(file)


def train_once(
    comm: Communicator, fn: Callable[..., Any], folder: str, diary_path: str, fault: Fault
) -> None:
    """One start of the training, in a process of its own."""
    diary = Diary(diary_path, folder, fault)
    os.fsync = functools.partial(diary.fsync, os.fsync)
    sys.addaudithook(diary.hook)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, _WIDTH), nn.ReLU(), nn.Dropout(0.5), nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_epoch(epoch: int) -> None:
        diary.watch(False)
        if isinstance(epoch, bool) or not isinstance(epoch, Integral) or not 0 <= epoch < NUM_EPOCHS:
            from course_lib.classroom.checks.runs import Wrong  # here: most starts need nothing of it

            raise Wrong(
                f"train_epoch was called with {epoch!r}; expected an epoch from 0 to {NUM_EPOCHS - 1}"
            )
        epoch = int(epoch)
        diary.line(epoch=epoch, state=_digests(model, optimizer))
        model.train()
        generator = torch.Generator().manual_seed(epoch)
        for step in range(_NUM_STEPS):
            if (epoch, step) == fault.step:
                os.kill(os.getpid(), signal.SIGKILL)
            inputs = torch.randn(8, 64, generator=generator)
            optimizer.zero_grad()
            (model(inputs).squeeze(1) - inputs[:, 0]).square().mean().backward()
            optimizer.step()
        diary.watch(epoch == WATCHED)

    fn(Path(folder, "snapshot.pt"), model, optimizer, NUM_EPOCHS, train_epoch)
    diary.watch(False)
    diary.line(end=True, state=_digests(model, optimizer), files=sorted(os.listdir(folder)))


def _digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of the parameters, of the momentum ("": there is none) and of torch's generator."""
    parameters = list(model.parameters())
    momenta = [optimizer.state[p].get("momentum_buffer") for p in parameters if p in optimizer.state]
    tensors = [parameters, [one for one in momenta if one is not None], [torch.get_rng_state()]]
    return ["".join(_digest(one) for one in some) for some in tensors]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16]
