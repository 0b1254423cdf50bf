"""A real asynchronous run in which nothing is left to chance: who may pull is the learner's rule, who pushes next is
ours.

Real workers compute and push; the server holds each gradient that has arrived, as if it were still on its way. Only
when every worker is held, or waits for parameters, does the conductor decide what happens next. So the slowest worker
of all can be played, on any machine, at any load, with the same result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from course_lib.classroom.checks.runs import Wrong, it_raised, it_returned
from course_lib.classroom.checks.verdict import plural
from course_lib.comm.communicator import Communicator
from course_lib.parallel.parameter_server import AsyncParameterServer, may_pull
from course_lib.parallel.parameter_server.serving import Serving

_STEPS = 6  # of each worker
SLOW, MIXED = "slow", "mixed"  # worker 1's gradients come as late as they can; or any order
_RUNS = tuple((bound, order) for bound in (0, 1, 2, 4) for order in (SLOW, MIXED))


@dataclass(frozen=True)
class Outcome:
    """One run. `at_once`: the most workers that were in flight together, of `num_workers`. `refused`: where the rule
    said no and might have said yes, "" if nowhere.
    """

    bound: int
    order: str
    staleness: list[int]
    at_once: int
    num_workers: int
    refused: str

    def problem(self) -> str:
        stalest, most = max(self.staleness), min(self.num_workers, self.bound + 1)
        if stalest > self.bound:
            stale = plural(stalest, "update")
            return f"with bound {self.bound} an update was {stale} stale, which is more than the bound"
        needless = f"no update was too stale, but your rule makes workers wait that need not: with bound {self.bound}"
        if self.at_once < most:
            at_once = plural(self.at_once, "worker")
            return f"{needless} no more than {at_once} of {self.num_workers} computed at once, where {most} could"
        if self.order == SLOW and stalest < self.bound:
            return (
                f"{needless} the others stopped for a slow worker after {plural(stalest, 'update')} already"
            )
        if self.refused:
            return f"{needless} it says no where nobody's update can become too stale ({self.refused})"
        return ""


def conduct(comm: Communicator, fn: Callable[..., Any]) -> list[Outcome]:
    """All runs, one after the other; what the server saw (other ranks: an empty list)."""
    outcomes: list[Outcome] = []
    for bound, order in _RUNS:
        module = nn.Linear(1, 1)
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
        refused: list[str] = []
        serving = partial(Conducted, fn, order, refused)
        server = AsyncParameterServer(module, comm, sgd, bound=bound, serving=serving)
        batch = (torch.ones(1, 1), torch.ones(1, 1))
        report = server.run([batch] * _STEPS, nn.functional.mse_loss)
        if report is not None:
            workers = comm.world_size - 1
            said_no = refused[0] if refused else ""
            outcomes.append(Outcome(bound, order, report.staleness, report.at_once, workers, said_no))
    return outcomes


class Conducted(Serving):
    """A server that hands out parameters and applies gradients only when no worker is on its way to it."""

    def __init__(self, rule: Callable[..., Any], order: str, refused: list[str], *args: Any) -> None:
        super().__init__(*args)
        self.rule, self.order, self.refused = rule, order, refused
        self.asking: dict[int, int] = {}  # worker -> its place in the queue
        self.arrived: set[int] = set()  # workers whose gradient is here
        self.pushed: dict[int, int] = {}  # worker -> the version its last update made

    def may_pull(self, version: int, in_flight: Mapping[int, int], bound: int) -> bool:  # type: ignore[override]
        where = f"version={version}, in_flight={dict(sorted(in_flight.items()))}, bound={bound}"
        try:
            answer = self.rule(version, dict(in_flight), bound)
            allowed = bool(answer)
        except NotImplementedError:
            raise
        except Exception as error:
            raise Wrong(f"{it_raised(error)} ({where})") from error
        if answer is None:
            raise Wrong(f"{it_returned(answer)}; expected True or False ({where})")
        if not allowed and not in_flight:
            raise Wrong(
                f"deadlock: nobody is in flight, so nothing can change, and nobody may pull ({where})"
            )
        if not allowed and may_pull(version, in_flight, bound):
            self.refused.append(where)
        return allowed

    def take_turn(self, worker: int) -> torch.Tensor:
        with self.state:
            self.asking[worker] = self.pushed.get(worker, worker - self.comm.world_size)
            self._wait_to_be_chosen(worker)
            del self.asking[worker]
            return self.hand_out(worker)

    def apply(self, worker: int, *push: Any) -> None:
        with self.state:
            self.arrived.add(worker)
            self._wait_to_be_chosen(worker)
            self.arrived.discard(worker)
            super().apply(worker, *push)
            self.pushed[worker] = self.version

    def _wait_to_be_chosen(self, worker: int) -> None:
        self.state.notify_all()
        self.state.wait_for(lambda: self._chosen() == worker)

    def _chosen(self) -> int | None:
        """The worker that goes on, or None while one is still on its way."""
        if len(self.asking) + len(self.arrived) < len(self.serving):
            return None
        if self.asking and self._may_pull():
            return min(self.asking, key=lambda worker: self.asking[worker])
        if self.order == SLOW:
            return min(self.arrived - {1} or self.arrived)
        return random.Random(self.version).choice(sorted(self.arrived))
