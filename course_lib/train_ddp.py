"""Train on the handwritten digits with DistributedDataParallel, and survive: the script of chapter 04.

    python -m course_lib.train_ddp --total_epochs 10 --snapshot_path snapshot.pt
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m course_lib.train_ddp --total_epochs 10

Rank 0 prints a line for each epoch, and one where it goes on from a snapshot. Epochs and steps count from 0. Exit
code 0: trained to the end. 143: stopped by SIGTERM, the snapshot is on the disk. 1: an error.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from course_lib.classroom.datasets import digits
from course_lib.classroom.models import MLP, DigitsCNN
from course_lib.comm.communicator import Communicator
from course_lib.parallel.sampler import DistributedSampler
from course_lib.parallel.trainer import (
    EXIT_CODE,
    Journal,
    Trainer,
    process_group,
    process_started,
    restart_count,
    run_id,
)

_IMPORTED = time.time()


class Demonstration(Trainer):
    """A Trainer that can be slow enough to watch, and dies where it is told: on rank `crash_at[2]` with SIGKILL, before
    step `crash_at[1]` of epoch `crash_at[0]`, and not again in the same job of torchrun."""

    crash_at: tuple[int, int, int] | None = None
    step_delay_s = 0.0

    def check_crash(self, total_epochs: int) -> None:
        """Say so if the training never comes to that place. (No error: with more or fewer nodes it may.)"""
        num_steps = math.ceil(math.ceil(self.sampler.length / self.comm.world_size) / self.batch_size)
        ends = {"epoch": total_epochs, "step": num_steps, "rank": self.comm.world_size}
        for (name, end), number in zip(ends.items(), self.crash_at or (), strict=False):
            if number >= end:
                self.say(
                    f"WARNING: --crash_at: nothing will crash at {name} {number}: there are {end}, counted from 0",
                    sys.stderr,
                )

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        here = (self.progress.epoch, self.progress.step, self.comm.rank)
        if here == self.crash_at and self._crashes():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.step_delay_s)
        return super().train_step(inputs, targets)

    def _crashes(self) -> bool:
        """Whether it has not yet, in this job. The job's name says it, if it has one: see `run_id`."""
        if not run_id():
            return restart_count() == 0
        crashed = self.snapshot_path.with_name(self.snapshot_path.name + ".crashed")
        if crashed.exists() and crashed.read_text() == run_id():
            return False
        crashed.write_text(run_id())
        return True


@record  # torchrun then shows the exception of the rank that failed first
def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code. Where torch.distributed is set up already, its default group is used."""
    options = parser().parse_args(arguments)
    with process_group() as comm:
        journal = Journal(comm.rank, audit=options.audit, events=options.events)
        journal.event("process start", process_started())
        journal.event("torch imported", _IMPORTED)
        journal.event("process group ready")
        trainer = build(options, comm, journal)
        journal.event("model ready")
        trainer.fit(options.total_epochs)
        if not trainer.losses and not trainer.stopped:
            trainer.say(f"nothing left to train: --total_epochs {options.total_epochs} are done")
        if trainer.stopped:
            trainer.say(f"stopped by SIGTERM; the snapshot is in {options.snapshot_path}")
        return EXIT_CODE if trainer.stopped else 0


def build(options: argparse.Namespace, comm: Communicator, journal: Journal) -> Trainer:
    """What the options say, put together on this rank."""
    model: torch.nn.Module
    if options.model == "mlp":
        model = MLP(64, 57, 10, dropout=options.dropout, seed=options.seed)
    else:
        model = DigitsCNN(dropout=options.dropout, seed=options.seed)
    images, labels = digits("train", flat=options.model == "mlp")
    sampler = DistributedSampler(len(labels), comm.world_size, comm.rank, seed=options.seed)
    wrapped = DistributedDataParallel(
        model.to(comm.device), device_ids=[comm.device] if comm.device.type == "cuda" else None
    )
    if options.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            wrapped.parameters(), 0.1 if options.lr is None else options.lr, momentum=0.9
        )
    else:
        optimizer = torch.optim.Adam(wrapped.parameters(), 0.003 if options.lr is None else options.lr)
    trainer = Demonstration(
        wrapped,
        optimizer,
        TensorDataset(images, labels),
        sampler,
        comm,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        journal=journal,
        **{name: getattr(options, name) for name in _PASSED_ON},
    )
    trainer.step_delay_s = options.step_delay
    if options.crash_at:
        epoch, step, *rank = options.crash_at
        trainer.crash_at = (epoch, step, rank[0] if rank else comm.world_size - 1)
        trainer.check_crash(options.total_epochs)
    return trainer


_PASSED_ON = ("batch_size", "snapshot_path", "save_every", "save_every_steps", "resume", "seed", "grace_s")


# --- the command line


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, got {text!r}")
    return number


def _share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return float(text)


def _whole(least: int, most: int = 2**63 - 1) -> Any:
    """From `least` to `most`; torch's numbers, such as seeds, have 64 bits."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more, got {text!r}")
        if int(text) > most:
            raise argparse.ArgumentTypeError(f"expected a whole number, at most {most}, got {text!r}")
        return int(text)

    return number


def _place(text: str) -> tuple[int, ...]:
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected EPOCH:STEP or EPOCH:STEP:RANK, as in 1:5, got {text!r}")
    return tuple(map(int, parts))


OPTIONS: dict[str, dict[str, Any]] = {
    "total_epochs": {
        "type": _whole(0),
        "default": 10,
        "help": "epochs in all, those before a restart included (10)",
    },
    "save_every": {"type": _whole(1), "default": 1, "help": "write a snapshot after so many epochs (1)"},
    "save_every_steps": {"type": _whole(1), "help": "and after so many steps (not)"},
    "batch_size": {"type": _whole(1), "default": 32, "help": "samples per step on each rank (32)"},
    "snapshot_path": {
        "type": Path,
        "default": Path("snapshot.pt"),
        "help": "where the snapshot is (snapshot.pt)",
    },
    "resume": {
        "choices": ("auto", "never", "must"),
        "default": "auto",
        "help": "go on from a snapshot: if there is one (auto), never (set it aside), or demand it (must)",
    },
    "model": {"choices": ("mlp", "cnn"), "default": "mlp", "help": "(mlp)"},
    "dropout": {"type": _share, "default": 0.1, "help": "share of values that dropout sets to 0 (0.1)"},
    "optimizer": {"choices": ("sgd", "adam"), "default": "sgd", "help": "sgd has momentum 0.9 (sgd)"},
    "lr": {
        "type": _not_negative,
        "help": "learning rate (sgd 0.1, adam 0.003); on resuming, the snapshot's counts",
    },
    "seed": {"type": _whole(0), "default": 0, "help": "of the model, the order of samples and dropout (0)"},
    "grace_s": {
        "type": _not_negative,
        "default": 20.0,
        "help": "after SIGTERM, end at the latest after so many seconds (20)",
    },
    "audit": {
        "type": Path,
        "metavar": "FILE",
        "help": "append the samples of every completed step, as JSON lines",
    },
    "events": {"type": Path, "metavar": "FILE", "help": "append what happened when, as JSON lines"},
    "step_delay": {
        "type": _not_negative,
        "default": 0.0,
        "metavar": "S",
        "help": "for demonstrations: wait before each step",
    },
    "crash_at": {
        "type": _place,
        "metavar": "EPOCH:STEP[:RANK]",
        "help": "for demonstrations: this rank (the last) kills itself before this step, once in a job of torchrun",
    },
}


def parser() -> argparse.ArgumentParser:
    """Every option can be written with underscores or with hyphens."""
    made = argparse.ArgumentParser(
        prog="python -m course_lib.train_ddp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, details in OPTIONS.items():
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        made.add_argument(*spellings, dest=name, **details)
    return made


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads live on, and one that still lets go of the last collective's tensors while Python
    # shuts down aborts the process ("terminate called without an active exception"). All there is to keep is kept.
    os._exit(code or 0)
