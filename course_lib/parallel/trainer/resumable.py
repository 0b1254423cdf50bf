"""What a training is made of, how it becomes a snapshot, and how it goes on from one."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.comm.communicator import Communicator
from course_lib.parallel.trainer import rng, shared, snapshot
from course_lib.parallel.trainer.fits import check_fits, refused
from course_lib.parallel.trainer.journal import Journal, run_id
from course_lib.parallel.trainer.snapshot import SnapshotError

Resume = Literal["auto", "never", "must"]
_OTHER = "Give the same model, optimizer, scheduler and data as before, or begin anew with `--resume never`."

_PARTS: dict[str, Any] = {
    "world_size": int,
    "batch_size": int,
    "progress": dict,
    "model": dict,
    "optimizer": dict,
    "scheduler": dict | None,
    "sampler": dict,
    "rng": list,
}


@dataclass
class Progress:
    """How far a training has come. Samples are counted over all ranks, padding included."""

    epoch: int = 0  # epochs done, and so the number of the one that is being trained
    step: int = 0  # steps done in it
    global_step: int = 0
    samples: int = 0
    loss_sum: float = 0.0  # over the samples of this epoch so far
    loss_samples: int = 0
    epoch_losses: list[float] = field(default_factory=list)


class Resumable:
    """A training as far as snapshots know it. `Trainer` adds the loop, and says what the arguments are."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        sampler: Any,
        comm: Communicator,
        batch_size: int,
        snapshot_path: Path | str,
        resume: Resume,
        seed: int,
        journal: Journal | None,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.sampler, self.comm, self.batch_size = sampler, comm, batch_size
        self.snapshot_path, self.resume, self.seed = Path(snapshot_path), resume, seed
        self.journal = journal or Journal(comm.rank)
        self.progress = Progress()
        self._saved: Progress | None = None  # what the snapshot on the disk holds

    # --- the state

    @property
    def bare_model(self) -> nn.Module:
        """The model without torch's wrapper, whose state_dict puts `module.` before every name."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, on every rank. All ranks call it: their generators are gathered."""
        return {
            "world_size": self.comm.world_size,
            "batch_size": self.batch_size,
            "progress": dataclasses.asdict(self.progress),
            "model": self.bare_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "rng": shared.gather_objects(self.comm, rng.capture(self.comm.device)),
            "kinds": self._kinds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, perhaps with another number of ranks. SnapshotError if it is another training's."""
        self._check_fits(state)
        with refused(f"rank {self.comm.rank}", _OTHER):
            self.bare_model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.sampler.load_state_dict(state["sampler"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            self.progress = Progress(**state["progress"])
            if self.comm.rank < len(state["rng"]):
                rng.restore(state["rng"][self.comm.rank], self.comm.device)
            else:  # a rank that was not there then
                rng.seed_all(self.seed, self.comm.rank, self.progress.samples)

    def _check_fits(self, state: Any) -> None:
        """Raise SnapshotError if `state` is none of this training. Nothing has been loaded then."""
        who = f"rank {self.comm.rank}"
        check_fits(state, _PARTS, self._kinds(), who, _OTHER)
        expected = {field.name for field in dataclasses.fields(Progress)}
        if set(state["progress"]) != expected or not all(map(rng.is_state, state["rng"])):
            raise SnapshotError(
                f"{who}: the snapshot does not fit: its 'progress' or its 'rng' is not as a Trainer writes it. {_OTHER}"
            )

    def _kinds(self) -> dict[str, str]:
        return {"optimizer": type(self.optimizer).__name__, "scheduler": type(self.scheduler).__name__}

    # --- to the disk

    def save(self, last: bool = False) -> None:
        """Write a snapshot, on rank 0; all ranks call, and hear whether it is on the disk.

        If that fails, training goes on, with a message, and the next time may succeed; the snapshot before stays
        valid. With `last` there is no next time: it raises SnapshotError, on every rank. What is on the disk already
        is not written again.
        """
        if self._saved == self.progress:  # the same on all ranks: what follows needs all of them
            return
        state = self.state_dict() | {"run": run_id()}
        kind, text = shared.broadcast_outcome(self.comm, *self._write(state))
        if kind == shared.DONE:
            self._saved = Progress(**state["progress"])
        elif last:
            raise SnapshotError(text.decode())
        else:
            warning = f"WARNING: {text.decode()} Training goes on; the next snapshot is tried when it is due."
            self.say(warning, sys.stderr)

    def _write(self, state: dict[str, Any]) -> tuple[int, bytes]:
        """On rank 0: (what came of it, the error's text). On the others nothing."""
        try:
            if self.comm.rank == 0:
                snapshot.write(self.snapshot_path, snapshot.pack(state))
                self.journal.event("snapshot written", epoch=self.progress.epoch, step=self.progress.step)
        except SnapshotError as error:
            return shared.FAILED, str(error).encode()
        return shared.DONE, b""

    def check_snapshot(self) -> None:
        """Raise SnapshotError on rank 0 if a snapshot of what there is now could not be written, or not be read."""
        state = self.state_dict()
        if self.comm.rank == 0:
            data = snapshot.pack(state)
            snapshot.unpack(data, "A trial snapshot of this model, optimizer and scheduler")
            snapshot.check_writable(self.snapshot_path, data)

    # --- and back

    def restore(self) -> None:
        """Begin, or go on from the newest whole snapshot: the same one on every rank, read by rank 0."""
        kind, data = shared.broadcast_outcome(self.comm, *self._look())
        if kind == shared.FAILED:
            raise SnapshotError(data.decode())
        if kind == shared.NOTHING:
            rng.seed_all(self.seed, self.comm.rank, 0)
        else:
            state = snapshot.unpack(data)
            self._check_fits(state)
            self.warm_up()
            self.load_state_dict(state)
            self._saved = Progress(**state["progress"])
            self.journal.event("snapshot loaded", epoch=self.progress.epoch, step=self.progress.step)
            self.say(f"resumed from snapshot epoch {self.progress.epoch}, step {self.progress.step}")
            self._say_what_changed(state)
        self.journal.begin(self.progress.epoch, self.progress.step, self.comm.world_size)

    def warm_up(self) -> None:
        """What a resumed process must have done before its first step."""

    def _look(self) -> tuple[int, bytes]:
        """(what rank 0 found, the snapshot's bytes or the error's text); on the other ranks nothing."""
        try:
            self.check_snapshot()
            return self._find() if self.comm.rank == 0 else (shared.NOTHING, b"")
        except SnapshotError as error:
            return shared.FAILED, str(error).encode()

    def _find(self) -> tuple[int, bytes]:
        path, previous = self.snapshot_path, snapshot.previous_of(self.snapshot_path)
        if self.resume == "never" and not self._is_of_this_run():
            for old in filter(os.path.lexists, (path, previous)):
                self.say(f"{old} is not resumed: set aside as {snapshot.set_aside(old)}")
        found = snapshot.latest(path)
        if found is None:
            if self.resume == "must":
                raise SnapshotError(
                    f"There is no snapshot {path} to go on from, as `--resume must` demands. "
                    "Check --snapshot_path, or begin with `--resume auto`."
                )
            return shared.NOTHING, b""
        for problem in found.problems:
            self.say(f"WARNING: {problem}; {found.path}, the one before it, is used", sys.stderr)
        if found.path == previous and os.path.lexists(path):
            snapshot.set_aside(path)  # or the next save would make it the previous one
        return shared.DONE, found.data

    def _is_of_this_run(self) -> bool:
        """Whether this process belongs to a run that has set aside what it found, and goes on from its own snapshot."""
        if not run_id():
            return self.journal.restart > 0
        try:
            found = snapshot.latest(self.snapshot_path)
        except SnapshotError:
            return False
        return found is not None and isinstance(found.state, dict) and found.state.get("run") == run_id()

    def _say_what_changed(self, state: dict[str, Any]) -> None:
        if state["batch_size"] != self.batch_size:
            self.say(
                f"batch size {self.batch_size} instead of {state['batch_size']} on each rank, from here on"
            )
        old_size, new_size = state["world_size"], self.comm.world_size
        if new_size != old_size:
            joined = ", ".join(map(str, range(old_size, new_size)))
            self.say(
                f"world size {new_size} instead of {old_size}: the rest of the epoch is dealt out anew"
                + (
                    f"; new ranks ({joined}) draw random numbers from seed, rank and samples"
                    if joined
                    else ""
                )
            )

    def say(self, text: str, stream: Any = None) -> None:
        """Print, on rank 0 alone."""
        if self.comm.rank == 0:
            print(text, file=stream or sys.stdout, flush=True)
