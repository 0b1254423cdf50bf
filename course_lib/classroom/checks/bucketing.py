"""The exercise on buckets: what a DDP does when a gradient is ready, put into the library's DDP and watched."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from course_lib.classroom.checks.bucketing_judge import Backward, problem
from course_lib.classroom.checks.meeting import hang
from course_lib.classroom.checks.runs import RunExercise, Wrong, it_raised, run
from course_lib.classroom.checks.verdict import Verdict, failed, plural
from course_lib.comm.board import Board
from course_lib.comm.communicator import Communicator
from course_lib.parallel.ddp import BucketedDDP
from course_lib.runtime.errors import LaunchError

_WIDTH, _NUM_STEPS = 4, 3
_LAYER_MB = 8 * (_WIDTH * _WIDTH + _WIDTH) / 2**20  # of one layer's gradients in float64
_GradientReady = Callable[[BucketedDDP, nn.Parameter], None]


class _Chain(nn.Module):
    """Six layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class _Branches(nn.Module):
    """Two layers side by side. swap: the second one is computed first, so its gradient comes last. skip: without it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.head = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, swap: bool = False, skip: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        branches = [self.left] if skip else [self.right, self.left] if swap else [self.left, self.right]
        x = torch.stack([torch.tanh(branch(x)) for branch in branches]).sum(dim=0)
        return self.head(x)


@dataclass(frozen=True)
class Setting:
    """A model, and what rank r's forward does in a step."""

    name: str
    model: Callable[[], nn.Module]
    num_layers: int  # in a bucket; the first holds one
    forward: Callable[[int, int], dict[str, bool]] = lambda rank, step: {}
    worlds: tuple[int, ...] = (2,)
    num_contributing: int | None = None  # None: all ranks

    def where(self, world_size: int) -> str:
        return f"({plural(world_size, 'rank')}, {self.name})"


SETTINGS = (
    Setting("six layers", _Chain, 2, worlds=(1, 2)),
    Setting(
        "two branches, which every other rank computes in the other order",
        _Branches,
        1,
        lambda rank, step: {"swap": rank % 2 == 1},
    ),
    Setting(
        "two branches, one of which every other rank leaves out in the second step",
        _Branches,
        1,
        lambda rank, step: {"skip": rank % 2 == 1 and step == 1},
    ),
    Setting(
        "self.num_contributing is 1, as where one rank is the last with data", _Chain, 2, num_contributing=1
    ),
    Setting("six layers", _Chain, 2, worlds=(3, 4)),
)


@contextmanager
def _counted_waits() -> Iterator[list[Any]]:
    """What is waited for inside: through the Communicator, or with torch's own calls."""
    waited, wait = [], dist.Work.wait

    def counted(work: Any, *args: Any, **kwargs: Any) -> Any:
        waited.append(work)
        return wait(work, *args, **kwargs)

    with mock.patch.object(dist.Work, "wait", counted):
        yield waited


class _Watched(BucketedDDP):
    """The library's DDP with the learner's `gradient_ready`; it writes down what happens in a backward."""

    learners: ClassVar[Any]
    where: str

    def begin_backward(self) -> None:
        super().begin_backward()
        self.log = Backward([len(bucket.views) for bucket in self.buckets])
        self._before = self._entered()

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        number = next(i for i, bucket in enumerate(self.buckets) if parameter in bucket.views)
        self.log.came.append(number)
        self.log.came_s.append(time.monotonic())
        empty = (
            " (here parameter.grad is None: this rank has nothing to add)" if parameter.grad is None else ""
        )
        try:
            with _counted_waits() as waits:
                self.learners(parameter)
        except NotImplementedError:
            raise
        except Exception as error:
            raise Wrong(f"{it_raised(error)}{empty} {self.where}") from error
        self.log.waited |= bool(waits)
        for i, bucket in enumerate(self.buckets):
            if bucket.sum is not None and i not in self.log.left:
                self.log.left[i] = len(self.log.came)

    def average_gradients(self) -> None:
        self.log.num_collectives = self._entered() - self._before
        stayed = [i for i, bucket in enumerate(self.buckets) if bucket.sum is None]
        if stayed:
            raise Wrong(
                f"backward is over, and bucket {stayed[0]} of {len(self.buckets)} has not left: "
                f"{self._why_not(stayed)} {self.where}"
            )
        super().average_gradients()
        self.log.sums = self._board.collectives(self.comm.global_rank)[: self._entered() - self._before]

    def _why_not(self, stayed: list[int]) -> str:
        """Why the buckets with these numbers have not left."""
        bucket = self.buckets[stayed[0]]
        if self.log.num_collectives > len(self.buckets) - len(stayed):
            return (
                "the all-reduce has run to its end inside your function, or its handle is lost: start it with "
                "async_op=True, which self.comm_hook does, and keep what it returns in bucket.sum"
            )
        if bucket.num_missing != 0:
            return (
                f"its bucket.num_missing is {bucket.num_missing}, though all of its "
                f"{plural(len(bucket.views), 'gradient')} have come: count it down by 1 with each, and start the "
                "all-reduce at 0"
            )
        return "bucket.sum is None: start its all-reduce when its last gradient has come, and keep its handle"

    def _entered(self) -> int:
        return self._board.num_collectives(self.comm.global_rank)

    @property
    def _board(self) -> Board:
        assert isinstance(self.comm.board, Board)
        return self.comm.board


def _train(comm: Communicator, fn: _GradientReady, setting: Setting) -> list[Backward]:
    """This rank's backwards."""
    kind: Any = type("YourDDP", (_Watched,), {"learners": fn})
    torch.manual_seed(0)
    module = setting.model().double()
    caps = {"bucket_cap_mb": setting.num_layers * _LAYER_MB, "first_bucket_mb": _LAYER_MB}
    model = kind(module, comm, **caps, find_unused_parameters=True)
    model.where = setting.where(comm.world_size)
    model.num_contributing = setting.num_contributing or comm.world_size
    names, found = {p: name for name, p in module.named_parameters()}, []
    for step in range(_NUM_STEPS):
        inputs = torch.randn(3, _WIDTH, dtype=torch.float64) + comm.rank + 1
        # In the last step parameter.grad is 0, not None: it still is what the step before left, most likely the view.
        keeps = step == _NUM_STEPS - 1
        model.zero_grad(set_to_none=not keeps)
        alone = copy.deepcopy(module)
        alone(inputs, **setting.forward(comm.rank, step)).square().sum().backward()
        model(inputs, **setting.forward(comm.rank, step)).square().sum().backward()
        model.log.keeps, model.log.num_contributing = keeps, model.num_contributing
        model.log.names = [names[p] for bucket in model.buckets for p in bucket.views]
        model.log.own = {key: _copied(p) for key, p in alone.named_parameters()}
        model.log.got = {key: _copied(p) for key, p in module.named_parameters()}
        found.append(model.log)
    return found


def _copied(parameter: nn.Parameter) -> torch.Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


class Bucketing(RunExercise):
    """f(self, parameter): a BucketedDDP's `gradient_ready`."""

    def judge(self, fn: _GradientReady, timeout: float) -> Verdict:
        # One launch for each: ranks that came to disagree in one could hang in the next, and in a launch of their own
        # torch.distributed's calls mean the same ranks as `self.comm`.
        for setting, size in [(one, size) for one in SETTINGS for size in one.worlds]:
            results = run(_train, fn, setting, world_size=size, timeout=timeout)
            found = problem(list(results))
            if found:
                return failed(f"{found[0]} {setting.where(size)}", found[1])
        first = results[0][0]  # of six layers, on 4 ranks
        early = sum(count < len(first.came) for count in first.left.values())
        text = (
            "passed: the right averages on 1, 2, 3 and 4 ranks, also where two ranks compute in another order or "
            "leave a layer out; each bucket in one all-reduce with exactly its bytes, in the same order on every rank; "
            f"with six layers {early} of {len(first.left)} buckets leave before backward is over"
        )
        return Verdict(passed=True, attempted=True, text=text)

    def ending(self, error: LaunchError) -> Verdict:
        return hang(error) or super().ending(error)


EXERCISE = Bucketing("bucketing", "self, parameter", BucketedDDP.gradient_ready)
