"""The exercise on resuming: the learner's training is killed, for real, again and again, and started again each time.

Every start is a new process. It is killed with SIGKILL in the middle of an epoch, in the middle of a write (a limit on
the size of a file, at which the kernel ends the process), and just before each change that Python makes to a file's
name. What a start finds, and where it goes on, is held against a run that was never killed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from course_lib.classroom.checks import resumable_judge as judge
from course_lib.classroom.checks.resumable_judge import NUM_EPOCHS, Start, State
from course_lib.classroom.checks.runs import RunExercise, Wrong, run
from course_lib.classroom.checks.verdict import NOT_ATTEMPTED, Verdict, failed
from course_lib.comm.communicator import Communicator
from course_lib.parallel.trainer.epochs import train_resumably
from course_lib.runtime.errors import LaunchError, RankError

_NUM_STEPS, _WIDTH = 3, 512
_CUT_BYTES = 64 << 10  # half of the parameters
_WATCHED = 2  # the epoch after which saving is disturbed
_MOST_CHANGES = 6
_CHANGES = {"os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "open"}


@dataclass(frozen=True)
class Fault:
    """When this start is killed. step: (epoch, step). cut: in the first large write after epoch `_WATCHED`. change:
    before so many changes to files, counted from the end of that epoch."""

    step: tuple[int, int] | None = None
    cut: bool = False
    change: int | None = None


_NONE = Fault()


class _Diary:
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


def _train(comm: Communicator, fn: Callable[..., Any], folder: str, diary_path: str, fault: Fault) -> None:
    """One start of the training, in a process of its own."""
    diary = _Diary(diary_path, folder, fault)
    os.fsync = functools.partial(diary.fsync, os.fsync)
    sys.addaudithook(diary.hook)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, _WIDTH), nn.ReLU(), nn.Dropout(0.5), nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_epoch(epoch: int) -> None:
        diary.watch(False)
        if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < NUM_EPOCHS:
            raise Wrong(
                f"train_epoch was called with {epoch!r}; expected an epoch from 0 to {NUM_EPOCHS - 1}"
            )
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
        diary.watch(epoch == _WATCHED)

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


def _plain(
    path: Path, model: Any, optimizer: Any, num_epochs: int, train_epoch: Callable[[int], None]
) -> None:
    for epoch in range(num_epochs):
        train_epoch(epoch)


@functools.cache
def _truth() -> list[State]:
    """What a run begins each epoch with, and ends with, if nobody kills it and it saves nothing."""
    with tempfile.TemporaryDirectory() as home:
        return _Trial(_plain, Path(home), timeout=15.0).start("plain").states


class Resumable(RunExercise):
    """f(path, model, optimizer, num_epochs, train_epoch)."""

    def judge(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        truth = _truth()
        with tempfile.TemporaryDirectory() as home:
            trial = _Trial(fn, Path(home), timeout)
            for problem in (trial.undisturbed, trial.killed_in_epochs, trial.killed_in_saves, trial.finished):
                text = problem(truth)
                if text:
                    return failed(text)
        synced = "" if trial.synced else judge.POWER_CUT
        text = (
            f"passed: killed {trial.num_kills} times, in the middle of an epoch, of a write and of a "
            "renaming, it goes on "
            "each time with the right epoch, the same parameters, momentum and random numbers, and ends in "
            "the same bits "
            f"as a run that was never killed{synced}"
        )
        return Verdict(passed=True, attempted=True, text=text)

    def ending(self, error: LaunchError) -> Verdict:
        if isinstance(error, RankError):
            return NOT_ATTEMPTED if error.exc_type == "NotImplementedError" else super().ending(error)
        return failed("it does not end: your function did not return")


class _Trial:
    """One function, started and killed in many folders. Each of its tests returns what is wrong, or ""."""

    def __init__(self, fn: Callable[..., Any], home: Path, timeout: float) -> None:
        self.fn, self.home, self.timeout = fn, home, timeout
        self.num_starts = self.num_kills = self.num_changes = 0
        self.synced = False

    def start(self, folder: str, fault: Fault = _NONE) -> Start:
        """One start in this folder. Raises RankError only for a function that is half written."""
        (self.home / folder).mkdir(exist_ok=True)
        self.num_starts += 1
        diary, error = self.home / f"{folder}.{self.num_starts}", None
        try:
            run(
                _train,
                self.fn,
                str(self.home / folder),
                str(diary),
                fault,
                world_size=1,
                timeout=self.timeout,
            )
        except RankError as rank_error:
            error = rank_error
            if error.exc_type == "NotImplementedError":
                raise
        lines = [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []
        found = Start.of(lines, error)
        self.num_kills += found.killed
        return found

    def undisturbed(self, truth: list[State]) -> str:
        start = self.start("whole")
        self.num_changes = start.num_changes
        self.synced = start.synced
        return judge.undisturbed(truth, start)

    def killed_in_epochs(self, truth: list[State]) -> str:
        """Twice: a run that has resumed must save what the next one can use."""
        places = [(2, 1), (5, 2)]
        self.start("epochs", Fault(step=places[0]))
        for number, (epoch, _) in enumerate(places):
            later = places[number + 1] if number + 1 < len(places) else None
            saved = bool(os.listdir(self.home / "epochs"))
            start = self.start("epochs", Fault(step=later))
            again = "" if number == 0 else " a second time"
            text = judge.resumed(truth, start, f"killed in the middle of epoch {epoch}{again}", epoch, epoch)
            if text:
                return text if saved else f"{text} (and nothing had been saved by then)"
        return ""

    def killed_in_saves(self, truth: list[State]) -> str:
        """In the middle of a large write, and before each change of a file."""
        faults = [Fault(cut=True), *(Fault(change=i) for i in range(min(self.num_changes, _MOST_CHANGES)))]
        for number, fault in enumerate(faults):
            if not self.start(f"save{number}", fault).killed:
                continue
            text = judge.resumed_after_save(truth, self.start(f"save{number}"), fault.cut, _WATCHED)
            if text:
                return text
        return ""

    def finished(self, truth: list[State]) -> str:
        return judge.finished(truth, self.start("whole"))


EXERCISE = Resumable("resumable", "path, model, optimizer, num_epochs, train_epoch", train_resumably)
