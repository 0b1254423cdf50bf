"""The smallest loop that survives: epochs of one process, with a snapshot after each.

What `Trainer` does for many ranks, steps and signals, for one process in a few lines. It costs one snapshot per epoch,
and a kill throws away at most the epoch it hits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from course_lib.parallel.trainer import rng, snapshot
from course_lib.parallel.trainer.fits import check_fits, refused

_CPU = torch.device("cpu")
_PARTS = {"next_epoch": int, "model": dict, "optimizer": dict, "rng": dict}
_OTHER = "Give the same model and optimizer as before, or another path."


def train_resumably(
    path: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_epochs: int,
    train_epoch: Callable[[int], None],
) -> None:
    """Call `train_epoch(epoch)` for epochs 0 … num_epochs-1; after a kill at any moment, the same call goes on.

    `train_epoch` trains `model` with `optimizer`, and draws from this process's CPU generators. The run that was killed
    ends in the same bits as one that was not. Raises SnapshotError if a snapshot cannot be written, or none of those
    there can be used.
    """
    epoch = _load(path, model, optimizer)
    while epoch < num_epochs:
        train_epoch(epoch)
        epoch += 1
        _save(path, model, optimizer, epoch)


def _save(path: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer, next_epoch: int) -> None:
    """All that the next epoch depends on."""
    state = {
        "kinds": {"loop": "train_resumably", "optimizer": type(optimizer).__name__},
        "next_epoch": next_epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": rng.capture(_CPU),
    }
    snapshot.write(path, snapshot.pack(state))  # another file, fsync, rename: there is always a whole one


def _load(path: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The epoch that comes next: 0 if nothing was saved."""
    found = snapshot.latest(path)
    if found is None:
        return 0
    kinds = {"loop": "train_resumably", "optimizer": type(optimizer).__name__}
    check_fits(found.state, _PARTS, kinds, str(found.path), _OTHER)
    with refused(str(found.path), _OTHER):
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        rng.restore(found.state["rng"], _CPU)  # last: loading itself may draw
    return found.state["next_epoch"]
