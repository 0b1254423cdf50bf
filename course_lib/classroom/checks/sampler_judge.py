"""The shares that a sampler dealt: what is wrong with them, from the coarse to the fine."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DistributedSampler as TorchSampler

from course_lib.classroom.checks.verdict import joined, plural

_SHOWN = 6


@dataclass(frozen=True)
class Deal:
    """One call on every rank."""

    length: int
    num_replicas: int
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0
    epoch: int = 0

    def __str__(self) -> str:
        text = f"length={self.length}, num_replicas={self.num_replicas}"
        text += f", shuffle=True, seed={self.seed}, epoch={self.epoch}" if self.shuffle else ", shuffle=False"
        return text + (", drop_last=True" if self.drop_last else "")

    @property
    def options(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def right(self) -> list[list[int]]:
        """rank -> its samples, as torch deals them."""
        shares, data = [], range(self.length)
        for rank in range(self.num_replicas):
            sampler: Any = TorchSampler(
                data,  # type: ignore[arg-type]
                self.num_replicas,
                rank,
                self.shuffle,
                self.seed,
                self.drop_last,
            )
            sampler.set_epoch(self.epoch)
            shares.append(list(sampler))
        return shares


@dataclass
class Answer:
    """What one call gave. `moved`: torch's global generator stands elsewhere afterwards."""

    indices: list[int]
    problem: str = ""
    moved: bool = False


def problem(deal: Deal, answers: list[Answer]) -> str:
    """What is wrong with the shares, from the coarse to the fine; "" if nothing is."""
    problems = [one.problem for one in answers if one.problem]
    if problems:
        return problems[0]
    shares, right = [one.indices for one in answers], deal.right()
    moved = any(one.moved for one in answers)
    if shares == right:
        return _MOVED if moved else ""
    return _sizes(deal, shares, right) or _whose(deal, shares, moved) or _order(deal, shares, right)


_MOVED = (
    "right samples, but your function drew from torch's global generator, so dropout and all other random numbers "
    "change with it: use a generator of its own, torch.Generator().manual_seed(seed + epoch)"
)


def _sizes(deal: Deal, shares: list[list[int]], right: list[list[int]]) -> str:
    lengths, wanted = [len(share) for share in shares], len(right[0])
    if len(set(lengths)) > 1:
        return (
            f"the ranks got {joined([str(length) for length in lengths])} samples: one with fewer leaves the loop "
            "while the others wait for its gradient for ever. Make the shares equally long"
        )
    if lengths[0] == wanted:
        return ""
    how = "cut so that every rank gets" if deal.drop_last else "padded so that every rank gets"
    return (
        f"every rank got {plural(lengths[0], 'sample')}; {plural(deal.length, 'sample')}, {how} equally many, are "
        f"{wanted} each"
    )


def _whose(deal: Deal, shares: list[list[int]], moved: bool) -> str:
    outside = [(rank, i) for rank, share in enumerate(shares) for i in share if not 0 <= i < deal.length]
    if outside:
        return "rank {} got index {}, which no sample has".format(*outside[0])
    if len(shares) > 1 and shares[0] and all(share == shares[0] for share in shares):
        return (
            "all ranks got the same samples, so every gradient is computed several times: rank r takes entries r, "
            "r + num_replicas, r + 2·num_replicas, … of the order"
        )
    times = Counter(i for share in shares for i in share)
    missing, most = [i for i in range(deal.length) if i not in times], max(times.values(), default=0)
    if not missing or (deal.drop_last and most == 1):
        return ""
    found = f"{plural(len(missing), 'sample')}, {missing[0]} for one, {'is' if len(missing) == 1 else 'are'} on no rank"
    twice = next(i for i, count in sorted(times.items()) if count == most)
    found += f", while sample {twice} is there {most} times"
    if not deal.shuffle:
        return found
    where = " (yours comes from torch's global generator, which stands elsewhere on each)" if moved else ""
    return (
        f"{found}: the ranks do not cut the same order{where}. Every rank must draw the same permutation, from "
        "torch.Generator().manual_seed(seed + epoch), and then take its own entries"
    )


def _order(deal: Deal, shares: list[list[int]], right: list[list[int]]) -> str:
    rank = next(rank for rank in range(len(shares)) if shares[rank] != right[rank])
    text = f"rank {rank} got {show(shares[rank])} where {show(right[rank])} is right"
    known = _known_orders(deal)
    reason = next((what for what, dealt in known.items() if dealt == shares and dealt != right), "")
    if not reason:
        reason = _recognise(deal, shares, right)
    return f"{text}: {reason}" if reason else text


def _known_orders(deal: Deal) -> dict[str, list[list[int]]]:
    blocks = [i % deal.length for i in range(sum(map(len, deal.right())))]
    size = len(blocks) // deal.num_replicas
    known = {
        "those are blocks, one after the other; torch deals like cards, rank r gets entries r, r + num_replicas, …": [
            blocks[rank * size :][:size] for rank in range(deal.num_replicas)
        ],
        "shuffled although shuffle=False": replace(deal, shuffle=True).right(),
    }
    if deal.shuffle:
        known = {
            "that is the order of epoch 0; the generator's seed must be seed + epoch": replace(
                deal, epoch=0
            ).right(),
            "that is the order of seed 0; the generator's seed must be seed + epoch": replace(
                deal, seed=0
            ).right(),
            "not shuffled although shuffle=True": replace(deal, shuffle=False).right(),
        }
    return known


def _recognise(deal: Deal, shares: list[list[int]], right: list[list[int]]) -> str:
    whole = [i for entries in itertools.zip_longest(*shares) for i in entries]
    order = [i for entries in itertools.zip_longest(*right) for i in entries]
    if deal.shuffle and deal.num_replicas > 1:
        unshuffled = replace(deal, shuffle=False).right()
        if [sorted(share) for share in shares] == [sorted(share) for share in unshuffled]:
            return "each rank shuffles its own share, so a sample never changes its rank. Shuffle first, then deal"
        if not deal.drop_last and whole[: deal.length] == order[: deal.length]:
            padding = order[: len(order) - deal.length]
            return f"the padding must be the beginning of the shuffled order, {show(padding)}"
    if not deal.shuffle and not deal.drop_last and whole[: deal.length] == order[: deal.length]:
        return "the padding must be the beginning of the order, repeated if need be"
    if not deal.shuffle and sorted(whole) == sorted(order):
        return "that is another order although shuffle=False: deal 0, 1, 2, … as they come"
    if deal.drop_last and len(order) < deal.length:
        return "drop_last leaves out the end of the order"
    if deal.shuffle and deal.num_replicas == 1:
        return (
            "the order must be torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))"
        )
    return ""


def show(indices: list[int]) -> str:
    return "[" + ", ".join([*map(str, indices[:_SHOWN]), *(["…"] if len(indices) > _SHOWN else [])]) + "]"
