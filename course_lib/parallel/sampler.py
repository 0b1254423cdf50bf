"""Which rank trains on which sample: every rank computes the same order, and takes every num_replicas-th entry.

No message is sent. The order follows from seed + epoch alone, so ranks that agree on these agree on everything, and a
run that was stopped can say with one number, `position`, how far into the epoch it had come.

Ranks must get equally many samples, or one waits in an all-reduce for ever. Where the length does not divide, the order
is *padded* with its own beginning: of 2048 samples, 3 ranks get 683 each, which is 2049, so one sample is trained on
twice in the epoch. (With 3 samples on 7 ranks there are 4 such.) With drop_last it is *cut* instead: 682 each, which is
2046, and two samples wait for an epoch in which the order puts them elsewhere.

    order       4 0 3 1 2     5 samples
    padded      4 0 3 1 2 4   for 2 ranks: entry i is order[i % 5]
    rank 0      4   3   2
    rank 1        0   1   4

Index for index this is `torch.utils.data.DistributedSampler`, also in what it adds up: seed 0 in epoch 1 is seed 1 in
epoch 0. What torch's has not is the way back into the middle of an epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import Sampler


def sampler_indices(
    length: int,
    num_replicas: int,
    rank: int,
    *,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    start: int = 0,
) -> list[int]:
    """The samples of rank `rank` in this epoch, in order: equally many on every rank, of the numbers 0 … length-1.

    start: so many entries of the epoch's order have been trained on, by all ranks together; what is left is dealt out.
    Raises ValueError or TypeError for what makes no sense.
    """
    _check_place(length, num_replicas, rank)
    _check_int("start", start, 0, "how many entries of the order have been trained on")
    order = list(range(length))
    if shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    stop = start + num_replicas * _share(length - start, num_replicas, drop_last)
    return [order[i % length] for i in range(start + rank, stop, num_replicas)]


def _share(left: int, num_replicas: int, drop_last: bool) -> int:
    """How many of `left` samples each rank gets."""
    rounded_up = 0 if drop_last else num_replicas - 1
    return max(left + rounded_up, 0) // num_replicas


class DistributedSampler(Sampler[int]):
    """This rank's samples, epoch by epoch: `DataLoader(dataset, sampler=DistributedSampler(len(dataset), N, rank))`.

    length: the number of samples, the same on every rank, as are num_replicas, seed, shuffle and drop_last. rank:
    0 … num_replicas-1. shuffle: a new order for each epoch, *if you call `set_epoch`*; without, every epoch repeats the
    first. `len()` is what the next iteration gives.

    To resume in the middle of an epoch, say after each step how many samples *all ranks together* have trained on:

        for epoch in range(sampler.epoch, num_epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...                                          # the step
                sampler.advance(len(batch) * num_replicas)

    Iterating does not count: a DataLoader fetches ahead of the step. `state_dict()` then holds the position, and after
    `load_state_dict` the iteration goes on there: with as many ranks as before, with exactly the batches that would
    have followed; with another number, what nobody has trained on yet is dealt out among them, none lost and at most
    num_replicas-1 doubled (with drop_last: at most as many left out, none doubled).

    Raises ValueError or TypeError for what makes no sense. Warns if every rank's share is empty.
    """

    def __init__(
        self,
        length: int,
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        _check_place(length, num_replicas, rank)
        _check_int("seed", seed, None, "the same whole number on every rank")
        self.length, self.num_replicas, self.rank = length, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = bool(shuffle), seed, bool(drop_last)
        self.epoch = 0
        self.position = 0  # entries of this epoch's order that have been trained on, by all ranks together
        if len(self) == 0:
            warnings.warn(
                f"nothing will be trained: drop_last with {length} samples on {num_replicas} ranks leaves every rank "
                "without a sample. Use fewer ranks, or drop_last=False",
                stacklevel=2,
            )

    def __iter__(self) -> Iterator[int]:
        if self.position > 0 and len(self) == 0:
            warnings.warn(
                f"epoch {self.epoch} has been trained to its end, nothing is left of it: call "
                f"set_epoch({self.epoch + 1}) before the next epoch",
                stacklevel=2,
            )
        return iter(
            sampler_indices(
                self.length,
                self.num_replicas,
                self.rank,
                epoch=self.epoch,
                seed=self.seed,
                shuffle=self.shuffle,
                drop_last=self.drop_last,
                start=self.position,
            )
        )

    def __len__(self) -> int:
        return _share(self.length - self.position, self.num_replicas, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of `epoch`: from its beginning, or where `load_state_dict` put it."""
        _check_int("epoch", epoch, 0, "the number of the epoch")
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, num_samples: int) -> None:
        """All ranks together have trained on `num_samples` more: the batch on this rank times num_replicas.

        Raises ValueError if that is no multiple of num_replicas, or more than is left of the epoch, padding included.
        """
        _check_int("num_samples", num_samples, 0, "how many samples all ranks together have trained on")
        left = len(self) * self.num_replicas
        if num_samples % self.num_replicas or num_samples > left:
            raise ValueError(
                f"rank {self.rank}: num_samples: expected a multiple of num_replicas={self.num_replicas}, since every "
                f"rank trains on equally many, and at most {left}, which are left of epoch {self.epoch}; "
                f"got {num_samples}. Count the batch of one rank, times num_replicas"
            )
        self.position += num_samples

    def state_dict(self) -> dict[str, int | bool]:
        """Where the training stands, the same on every rank, in plain numbers: `torch.load(weights_only=True)` does."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_replicas": self.num_replicas,
            **self._made_of(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, perhaps with another number of ranks.

        Raises ValueError if `state` is damaged, or of other data, or in another order.
        """
        made_of = self._made_of()
        if not isinstance(state, Mapping):
            raise TypeError(f"state: expected what state_dict() gave, got {type(state).__name__}")
        missing = [name for name in ("epoch", "position", "num_replicas", *made_of) if name not in state]
        if missing:
            raise ValueError(
                f"state: expected what DistributedSampler.state_dict() gave, got no {missing[0]!r}"
            )
        for name, mine in made_of.items():
            if state[name] != mine:
                raise ValueError(
                    f"state: taken with {name}={state[name]!r}, but this sampler has {name}={mine!r}, so the order of "
                    f"the samples is another. Make the sampler with {name}={state[name]!r}, or begin a new training"
                )
        for name in ("epoch", "position", "num_replicas"):
            _check_int(f"state[{name!r}]", state[name], 0, "what state_dict() gave")
        if state["position"] >= self.length + state["num_replicas"]:
            raise ValueError(
                f"state['position']: expected at most the {self.length} samples of an epoch and the padding for "
                f"{state['num_replicas']} ranks, got {state['position']}: the state is damaged"
            )
        self.epoch, self.position = state["epoch"], state["position"]

    def _made_of(self) -> dict[str, int | bool]:
        """What must be the same for an order to be the same."""
        return {
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }


def _check_place(length: int, num_replicas: int, rank: int) -> None:
    _check_int("length", length, 1, "the number of samples, as in len(dataset)")
    _check_int("num_replicas", num_replicas, 1, "the number of ranks")
    _check_int("rank", rank, None, f"0…{num_replicas - 1} for num_replicas={num_replicas}")
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank: expected 0…{num_replicas - 1} for num_replicas={num_replicas}, got {rank}")


def _check_int(argument: str, value: Any, least: int | None, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{argument}: expected a whole number ({meaning}), got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{argument}: expected {least} or more ({meaning}), got {value}")
