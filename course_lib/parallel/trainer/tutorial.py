"""The snapshots of the usual tutorial, and what they forget; here so that a chapter can measure how far they end from
the undisturbed run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from course_lib.parallel.trainer import rng
from course_lib.parallel.trainer.snapshot import SnapshotError
from course_lib.parallel.trainer.trainer import Trainer

MISTAKES = {
    "epoch": "the snapshot after an epoch holds that epoch's number, so the resumed run trains it again",
    "optimizer": "momentum, Adam's moments and the scheduler's learning rate start from nothing",
    "sampler": "the resumed run shuffles its first epoch as the very first was shuffled",
    "rng": "dropout draws what it drew at the very beginning",
}


class TutorialTrainer(Trainer):
    """A Trainer that makes these `mistakes` (some of `MISTAKES`; all) when it resumes. Undisturbed, it is a Trainer.

    With all of them, nothing counts in its snapshot but the model and the number of an epoch. Use `save_every`, not
    `save_every_steps`: it cannot resume inside an epoch, and raises SnapshotError.
    """

    def __init__(self, *args: Any, mistakes: Collection[str] = tuple(MISTAKES), **options: Any) -> None:
        super().__init__(*args, **options)
        unknown = sorted(set(mistakes) - set(MISTAKES))
        if unknown:
            raise ValueError(f"mistakes: expected some of {', '.join(MISTAKES)}, got {', '.join(unknown)}")
        self.mistakes, self._first_epoch = set(mistakes), 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        epoch, step = state["progress"]["epoch"], state["progress"]["step"]
        if self.mistakes and step:
            raise SnapshotError(
                f"rank {self.comm.rank}: a tutorial's snapshot counts whole epochs: expected one from the end of an "
                f"epoch, got one from epoch {epoch}, step {step}. Go on with Trainer, or begin anew: resume='never'."
            )
        rng.seed_all(self.seed, self.comm.rank, 0)
        fresh = self.state_dict()  # what a new training begins with
        forgotten = {"optimizer": ("optimizer", "scheduler"), "rng": ("rng",), "sampler": ("sampler",)}
        parts = [part for mistake in self.mistakes for part in forgotten.get(mistake, ())]
        super().load_state_dict(state | {part: fresh[part] for part in parts})
        if "epoch" in self.mistakes and epoch > 0:
            self.progress.epoch -= 1
            self.progress.epoch_losses.pop()
        self._first_epoch = self.progress.epoch

    def begin_epoch(self) -> None:
        forgets = "sampler" in self.mistakes
        self.sampler.set_epoch(self.progress.epoch - (self._first_epoch if forgets else 0))
