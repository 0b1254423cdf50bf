"""The Trainer: data-parallel training that may be stopped at any moment and goes on as if nothing had been.

    while epochs are left:
        for each batch:  train on it · agree on the loss and on stopping · count it · save, if it is time
        next epoch · save, if it is time

What comes next depends on more than the parameters: on the optimizer's moments, the scheduler, the place in the
epoch's order, and every rank's generators, from which dropout draws. A snapshot holds all of it (`resumable.py`), so
ten epochs, and four, a restart and six more, end in the same bits.

One more thing is learnt in the first step, and stands in no state_dict: after its first backward, torch's DDP puts the
gradients into its buckets anew, in the order in which they came. From three ranks on, a gradient at another place in
the ring is added up in another order, and rounds otherwise. So a resumed run first makes a forward and a backward that
it throws away (`warm_up`), and then has the same buckets as the run that was never stopped.

Per step, the ranks exchange two numbers beside the gradients (16 bytes in one all_reduce): the loss, and whether any
of them heard SIGTERM. On a GPU this waits for the step to end.

Left out: models that do not fit on one rank, gradient accumulation, mixed precision, evaluation, and loader worker
processes, whose generators no snapshot can reach in the middle of an epoch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sized
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from course_lib.comm.communicator import Communicator
from course_lib.parallel.trainer.journal import Journal
from course_lib.parallel.trainer.preemption import StopSignal
from course_lib.parallel.trainer.resumable import Progress, Resumable, Resume

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Trainer(Resumable):
    """Trains `model` on every rank of `comm`, and keeps a snapshot.

    model: wrapped for data parallelism, say in torch's DDP, and on `comm.device`. dataset: gives (input, target) for an
    index. sampler: a `parallel.sampler.DistributedSampler` made for this rank and for `len(dataset)` samples (torch's
    own cannot go on in the middle of an epoch). batch_size: samples per step *on each rank*. scheduler: steps once an
    epoch. loss_fn: the mean over a batch.

    snapshot_path: written by rank 0, after every `save_every` epochs, after every `save_every_steps` steps, at the end,
    and on SIGTERM. resume: "auto" goes on from a snapshot if there is one, "must" demands one, "never" sets aside what
    is there and begins anew. (What torchrun starts again, after a failure or because a node came or went, goes on all
    the same: the snapshot holds the job's name, from --rdzv-id. Without a name, as a job with fixed node ranks has
    none, the restart count must do.) seed: of all generators, on each rank with its rank. journal: where to write what
    happens. grace_s: see `StopSignal`.

    `progress` says how far it is; `losses` has the loss of each step of this process, the mean over all ranks;
    `stopped` is True after SIGTERM.

    Raises ValueError or TypeError for arguments that make no sense, SnapshotError if a snapshot cannot be written or
    used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset,
        sampler: Any,
        comm: Communicator,
        *,
        batch_size: int,
        snapshot_path: Path | str,
        save_every: int = 1,
        save_every_steps: int | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        loss_fn: Loss = F.cross_entropy,
        resume: Resume = "auto",
        seed: int = 0,
        journal: Journal | None = None,
        grace_s: float = 20.0,
    ) -> None:
        super().__init__(
            model, optimizer, scheduler, sampler, comm, batch_size, snapshot_path, resume, seed, journal
        )
        self.dataset, self.loss_fn = dataset, loss_fn
        self.save_every, self.save_every_steps, self.grace_s = save_every, save_every_steps, grace_s
        self.losses: list[float] = []
        self.stopped = self._ready = False
        self._check_arguments()

    def fit(self, total_epochs: int) -> Progress:
        """Train until `total_epochs` are done, counting those before a restart, or until SIGTERM. Either way, the
        snapshot is then on the disk."""
        self._check_fit(total_epochs)
        with StopSignal(self.grace_s) as stop:
            if not self._ready:
                self.restore()
                self._ready = True
            while self.progress.epoch < total_epochs and not self.stopped:
                self._train_epoch(stop)
            self.save(last=True)
        return self.progress

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One update from this rank's part of the batch. Returns its loss, shape ()."""
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def begin_epoch(self) -> None:
        """Another order of the samples; or the same, and the place in it, if this epoch had begun already."""
        self.sampler.set_epoch(self.progress.epoch)

    def warm_up(self) -> None:
        """A forward and a backward that are thrown away, on any samples; then torch's DDP has its final buckets."""
        few = [self.dataset[i] for i in range(min(self.batch_size, self.sampler.length))]
        inputs, targets = default_collate(few)
        self.model.train()
        self.loss_fn(self.model(inputs.to(self.comm.device)), targets.to(self.comm.device)).backward()
        self.optimizer.zero_grad()

    # --- one epoch

    def _train_epoch(self, stop: StopSignal) -> None:
        self.begin_epoch()
        self.model.train()
        for indices, inputs, targets in self._batches():
            mine = self.train_step(inputs.to(self.comm.device), targets.to(self.comm.device))
            loss, self.stopped = self._agree(mine, stop)
            self._count(indices, loss)
            if self.stopped:
                stop.settle()
                return
            if self.save_every_steps and self.progress.global_step % self.save_every_steps == 0:
                self.save()
        self._end_epoch()

    def _batches(self) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(indices, inputs, targets) of each step that is left of this epoch."""
        if len(self.sampler) == 0:  # stopped after the last step of an epoch
            return ()
        # Iterating a DataLoader draws a number. Drawn from the global generator, it would be drawn once more by a run
        # that resumes in the middle of an epoch; so it gets a generator of its own.
        own = torch.Generator()
        return DataLoader(_Numbered(self.dataset), self.batch_size, sampler=self.sampler, generator=own)

    def _agree(self, loss: torch.Tensor, stop: StopSignal) -> tuple[float, bool]:
        """The mean loss over the ranks, whose batches are equally long; and whether any rank is to stop."""
        numbers = torch.tensor([0.0, stop.received], dtype=torch.float64, device=self.comm.device)
        numbers[0] = loss
        self.comm.all_reduce(numbers)
        total, stops = numbers.tolist()
        return total / self.comm.world_size, stops > 0

    def _count(self, indices: torch.Tensor, loss: float) -> None:
        progress, num_samples = self.progress, len(indices) * self.comm.world_size
        self.journal.step(progress.epoch, progress.step, indices.tolist(), loss)
        self.sampler.advance(num_samples)
        self.losses.append(loss)
        progress.step += 1
        progress.global_step += 1
        progress.samples += num_samples
        progress.loss_samples += num_samples
        progress.loss_sum += loss * num_samples
        if len(self.losses) == 1:
            self.journal.event("first step done", epoch=progress.epoch, step=progress.step)
            self.check_snapshot()  # once more: only now do Adam's moments exist, twice the size of the model

    def _end_epoch(self) -> None:
        progress = self.progress
        loss = progress.loss_sum / max(progress.loss_samples, 1)
        self.say(f"epoch {progress.epoch}: loss {loss:.4f}")
        self.journal.event("epoch done", epoch=progress.epoch)
        if self.scheduler is not None:
            self.scheduler.step()
        progress.epoch_losses.append(loss)
        progress.epoch, progress.step = progress.epoch + 1, 0
        progress.loss_sum, progress.loss_samples = 0.0, 0
        self.sampler.set_epoch(progress.epoch)
        if progress.epoch % self.save_every == 0:
            self.save()

    # --- checks

    def _check_fit(self, total_epochs: int) -> None:
        _whole("total_epochs", total_epochs, 0)
        if self.stopped:
            self.say("WARNING: fit trains nothing more: SIGTERM has stopped this Trainer, and a new one goes on from "
                     f"the snapshot {self.snapshot_path}", sys.stderr)  # fmt: skip

    def _check_arguments(self) -> None:
        for name in ("batch_size", "save_every", "save_every_steps"):
            if name != "save_every_steps" or self.save_every_steps is not None:
                _whole(name, getattr(self, name), 1)
        if self.resume not in get_args(Resume):
            raise ValueError(f"resume: expected one of {', '.join(get_args(Resume))}, got {self.resume!r}")
        _whole("seed", self.seed, 0)
        if not 0 <= self.grace_s <= threading.TIMEOUT_MAX:
            raise ValueError(f"grace_s: expected a number of seconds, 0 or more, got {self.grace_s!r}")
        self._check_sampler()

    def _check_sampler(self) -> None:
        sampler, rank = self.sampler, self.comm.rank
        if not all(
            hasattr(sampler, name) for name in ("length", "rank", "num_replicas", "advance", "state_dict")
        ):
            raise TypeError(
                f"sampler: expected a DistributedSampler of course_lib.parallel.sampler, got {type(sampler)}, which "
                "cannot say how far into an epoch it has come"
            )
        if (made_for := (sampler.rank, sampler.num_replicas)) != (rank, self.comm.world_size):
            raise ValueError(
                f"rank {rank}: sampler: expected one for rank {rank} of {self.comm.world_size}, "
                f"got one for rank {made_for[0]} of {made_for[1]}"
            )
        size = len(self.dataset) if isinstance(self.dataset, Sized) else sampler.length
        if size != sampler.length:
            raise ValueError(
                f"rank {rank}: sampler: expected one for the {size} samples of the dataset, got one for "
                f"{sampler.length}; make it with len(dataset), and train on a part with torch's Subset"
            )


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}: expected a whole number, {least} or more, got {value!r}")


class _Numbered(Dataset):
    """(index, input, target), so that the audit knows which samples a batch holds."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (index, *self.dataset[index])
