"""Staleness: how old the parameters were that a gradient was computed with, and a rule that bounds it.

The staleness of an update is the number of updates applied between its worker's pull and itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def may_pull(version: int, in_flight: Mapping[int, int], bound: int) -> bool:
    """Whether one more worker may have the parameters now, so that no update can become staler than `bound`.

    `version`: updates applied so far. `in_flight`: worker -> the version it pulled, for all workers that have
    pulled and not pushed yet. Each of them will push once, in an order that nobody knows. So the update of a
    worker that pulled version v can at worst be applied after version - v updates that are done and one of
    every other worker in flight, the new one included.
    """
    ahead = len(
        in_flight
    )  # for each of them: the others in flight and the new one. For the new one: all of them
    oldest = min(in_flight.values(), default=version)
    return version - oldest + ahead <= bound


@dataclass(frozen=True)
class Update:
    """One update.

    `time_s`: since the server began to serve. `samples`: seen by it and all updates before. `loss`: the
    worker's, at the parameters it had pulled.
    """

    time_s: float
    worker: int
    staleness: int
    loss: float
    samples: int


@dataclass
class AsyncReport:
    """What the server saw.

    `updates`, in the order in which they were applied; `lost`: worker -> why it ended early; `at_once`: the most
    workers that had pulled and not pushed at one time.
    """

    updates: list[Update] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    at_once: int = 0

    @property
    def staleness(self) -> list[int]:
        return [update.staleness for update in self.updates]

    @property
    def updates_per_s(self) -> float:
        return len(self.updates) / self.updates[-1].time_s if self.updates else 0.0
