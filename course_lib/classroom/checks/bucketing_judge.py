"""What happened in a backward, and what of it is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from course_lib.classroom.checks.verdict import joined, plural
from course_lib.comm.board import Entered

_CLOSE = 1e-10  # float64: the same numbers, added in another order
_OVERWRITTEN = (
    "it is 0 in a step after zero_grad(set_to_none=False), where parameter.grad is the bucket's view already: read the "
    "gradient before you write into its view"
)


@dataclass
class Backward:
    """One backward on one rank. Buckets go by their number.

    sizes: how many gradients each has. came: the bucket of each gradient, in the order they came; came_s: when.
    left: bucket -> after how many gradients it left. waited: whether something was waited for in between. sums: the
    collectives, the newest first. own, got: each parameter's gradient on this rank alone, and after the average. keeps:
    the step began with the last one's gradients, set to 0. num_contributing: by which the sum must be divided.
    """

    sizes: list[int]
    came: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)
    waited: bool = False
    num_collectives: int = 0
    sums: list[Entered] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    own: dict[str, torch.Tensor | None] = field(default_factory=dict)
    got: dict[str, torch.Tensor | None] = field(default_factory=dict)
    keeps: bool = False
    num_contributing: int = 1

    def full(self, bucket: int) -> int:
        """After how many gradients the bucket was full."""
        return max(count for count, number in enumerate(self.came, start=1) if number == bucket)

    def may_leave(self, bucket: int) -> int:
        """… and may leave: not before those that go ahead of it."""
        return max(self.full(number) for number in range(bucket + 1))

    def __str__(self) -> str:
        after = [f"bucket {i} left after gradient {count}" for i, count in self.left.items()]
        return f"{', '.join(after)} of {len(self.came)}"


def problem(ranks: list[list[Backward]]) -> tuple[str, list[str]] | None:
    """The first thing wrong with the backwards of a world, `ranks[rank][step]`, and what each rank did."""
    for step in range(len(ranks[0])):
        logs = [backwards[step] for backwards in ranks]
        before = [backwards[step - 1] for backwards in ranks] if step else None
        text = _counts(logs) or _order(logs) or _values(logs, before) or _sums(logs) or _overlap(logs)
        if text:
            return text, [f"rank {rank}: {log}" for rank, log in enumerate(logs)]
    return None


def _counts(logs: list[Backward]) -> str:
    for rank, log in enumerate(logs):
        if log.num_collectives != len(log.sizes):
            return (
                f"rank {rank} started {plural(log.num_collectives, 'all-reduce')} in one backward, where there are "
                f"{plural(len(log.sizes), 'bucket')} for {len(log.came)} gradients: one all-reduce for each bucket, "
                "when its last gradient has come"
            )
    return ""


def _order(logs: list[Backward]) -> str:
    for rank, log in enumerate(logs):
        order = list(log.left)
        if order != sorted(order):
            at = next(i for i, number in enumerate(order) if number != i)
            return (
                f"on rank {rank} bucket {order[at]} left before bucket {at}: the n-th all-reduce of one rank meets the "
                "n-th of the others, whatever is in it. A bucket that is full too early waits for its turn"
            )
        for number, count in log.left.items():
            if count < log.full(number):
                have = sum(one == number for one in log.came[:count])
                return (
                    f"on rank {rank} bucket {number} left with {have} of its {plural(log.sizes[number], 'gradient')}: "
                    "and the others came too late for it. Wait until bucket.num_missing is 0"
                )
    return ""


def _values(logs: list[Backward], before: list[Backward] | None) -> str:
    for rank, log in enumerate(logs):
        for name in log.names:
            text = _wrong(logs, before, rank, name)
            if text:
                return f"wrong gradient of {name} on rank {rank}: {text}"
    return ""


def _wrong(logs: list[Backward], before: list[Backward] | None, rank: int, name: str) -> str:
    N, got = logs[rank].num_contributing, logs[rank].got[name]
    own = [log.own[name] for log in logs]
    like = next(one for one in own if one is not None)
    total = torch.stack([torch.zeros_like(like) if one is None else one for one in own]).sum(dim=0)
    if got is None:
        return "it is None, where the average is a tensor: set parameter.grad to the bucket's view of it"
    if torch.allclose(got, total / N, rtol=_CLOSE, atol=_CLOSE):
        return ""
    found = _recognise(logs[rank], len(logs), got, own[rank], total)
    if not found and before is not None and any(one is None for one in own):
        found = "a rank that left the layer out added what was in its bucket since the last step: its view must be 0"
    at = int((got - total / N).abs().argmax())
    values = f"element {at} is {got.flatten()[at]:.6g} where {(total / N).flatten()[at]:.6g} is right"
    return found or values


def _recognise(
    log: Backward, world_size: int, got: torch.Tensor, mine: torch.Tensor | None, total: torch.Tensor
) -> str:
    """What the wrong gradient is; "" if that is unknown. mine, total: this rank's own, and the sum over the ranks."""
    N = log.num_contributing
    lost = _OVERWRITTEN if log.keeps else "it is 0: nothing came into the bucket"
    known: list[tuple[torch.Tensor, str]] = [(torch.zeros_like(total), lost)]
    if mine is not None:
        known += [
            (mine, "it is this rank's own, not the average. That stands in the bucket: parameter.grad must be the "
                   "bucket's view of it"),
            (mine / N, f"it is this rank's own, divided by {N}; the other ranks' are missing: parameter.grad must be "
                       "the bucket's view, where the average will stand"),
        ]  # fmt: skip
    if world_size != N:
        known += [
            (total / world_size, f"it was divided by the number of ranks, {world_size}: divide by "
                                 "self.num_contributing, which is smaller inside join() where a rank has no data left"),
        ]  # fmt: skip
    known += [
        (total, f"it is {N} times too large: the sum was never divided by self.num_contributing"),
        (total / N / N, f"it is {N} times too small: it was divided by self.num_contributing twice"),
    ]
    return next((what for value, what in known if torch.allclose(got, value, rtol=1e-6, atol=_CLOSE)), "")


def _sums(logs: list[Backward]) -> str:
    numel = [0] * len(logs[0].sizes)
    names = iter(logs[0].names)
    for number, size in enumerate(logs[0].sizes):
        for name in (next(names) for _ in range(size)):
            numel[number] += next(log.own[name] for log in logs if log.own[name] is not None).numel()  # type: ignore[union-attr]
    right = sorted(f"all_reduce of {n} x float64" for n in numel)
    for rank, log in enumerate(logs):
        # The Communicator writes "20 x float64 sum", torch's own call "20 x float64".
        found = sorted(f"{one.op} of {' '.join(one.signature.split()[:3])}" for one in log.sums)
        if not log.waited and found != right:
            return (
                f"right averages, but rank {rank} called {joined(found)}, where the buckets are an "
                f"{joined(right)}: each gradient travels once"
            )
    return ""


def _overlap(logs: list[Backward]) -> str:
    for rank, log in enumerate(logs):
        if log.waited:
            return (
                f"right averages, but rank {rank} waits for an all-reduce inside your function, and backward stands "
                "still meanwhile: start it and return; the end of backward waits for all of them"
            )
        for number, count in log.left.items():
            if count > log.may_leave(number):
                return (
                    f"right averages, but on rank {rank} bucket {number} could leave after gradient "
                    f"{log.may_leave(number)} of {len(log.came)}, and left after {count}: start its all-reduce at "
                    "once, so that the rest of backward hides it"
                )
        starts = sorted(one.start for one in log.sums)
        early = [number for number, count in log.left.items() if count < len(log.came)]
        if early and starts[0] > log.came_s[-1]:
            return (
                f"right averages, but on rank {rank} the first all-reduce began after the last gradient had come, "
                f"though bucket.sum of bucket {early[0]} was set before: start it, with "
                "self.comm_hook(self.comm, bucket.flat)"
            )
    return ""
