"""The exercise on resuming: the learner's training is killed, for real, again and again, and started again each time.

Every start is a new process. It is killed with SIGKILL in the middle of an epoch, in the middle of a write (a limit on
the size of a file, at which the kernel ends the process), and just before each change that Python makes to a file's
name. What a start finds, and where it goes on, is held against a run that was never killed.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_lib.classroom.checks import resumable_judge as judge
from course_lib.classroom.checks.resumable_judge import Start, State
from course_lib.classroom.checks.resumable_run import NO_FAULT, WATCHED, Fault, train_once
from course_lib.classroom.checks.runs import RunExercise, run
from course_lib.classroom.checks.verdict import Verdict, failed
from course_lib.parallel.trainer.epochs import train_resumably
from course_lib.runtime.errors import RankError

_MOST_CHANGES = 6


def _plain(
    path: Path, model: Any, optimizer: Any, num_epochs: int, train_epoch: Callable[[int], None]
) -> None:
    for epoch in range(num_epochs):
        train_epoch(epoch)


@functools.cache
def _truth() -> list[State]:
    """What a run begins each epoch with, and ends with, if nobody kills it and it saves nothing."""
    with tempfile.TemporaryDirectory() as home:
        start = _Trial(_plain, Path(home), timeout=15.0).start("plain")
    if start.error is not None:
        raise RuntimeError("a training that nobody disturbs does not work here") from start.error
    return start.states


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
            f"passed: killed {trial.num_kills} times, in the middle of epochs and of saving, it goes on each time "
            "with the right epoch, the same parameters, momentum and random numbers, and ends in the same bits as "
            f"a run that was never killed{synced}"
        )
        return Verdict(passed=True, attempted=True, text=text)


class _Trial:
    """One function, started and killed in many folders. Each of its tests returns what is wrong, or ""."""

    def __init__(self, fn: Callable[..., Any], home: Path, timeout: float) -> None:
        self.fn, self.home, self.timeout = fn, home, timeout
        self.num_starts = self.num_kills = self.num_changes = 0
        self.synced = False

    def start(self, folder: str, fault: Fault = NO_FAULT) -> Start:
        """One start in this folder. Raises RankError only for a function that is half written."""
        (self.home / folder).mkdir(exist_ok=True)
        self.num_starts += 1
        diary, error = self.home / f"{folder}.{self.num_starts}", None
        try:
            run(
                train_once,
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
            text = judge.resumed_after_save(truth, self.start(f"save{number}"), fault.cut, WATCHED)
            if text:
                return text
        return ""

    def finished(self, truth: list[State]) -> str:
        return judge.finished(truth, self.start("whole"))


EXERCISE = Resumable("resumable", "path, model, optimizer, num_epochs, train_epoch", train_resumably)
