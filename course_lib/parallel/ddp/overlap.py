"""How much of the communication hid behind backward: read from a rank's trace.

Two things can run side by side for no longer than the shorter one takes. So what can be hidden is
min(computing, communicating), and the share of it that was is a number between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from course_lib.comm.trace import Event

BACKWARD, WAIT = "backward", "wait for gradients"
"""The spans that are read: a caller's `comm.span("backward")` around `loss.backward()`, and a wrapper's own, inside."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds, added up over the backwards of one rank.

    compute_s: backward without the wait at its end. comm_s: while an all-reduce was under way. hidden_s: while both
    were.
    exposed_s: the wait at the end.
    """

    compute_s: float
    comm_s: float
    hidden_s: float
    exposed_s: float

    @property
    def share(self) -> float:
        """hidden_s as a share of what could be hidden, min(compute_s, comm_s)."""
        most = min(self.compute_s, self.comm_s)
        return self.hidden_s / most if most else 0.0


def measure_overlap(events: Iterable[Event]) -> Overlap:
    """`events`: one rank's, `results.trace.rank(rank)`.

    Raises ValueError if there is no backward to look at, and for the events of several ranks: what one rank computes
    hides nothing of another's communication.
    """
    events = list(events)
    ranks = sorted({event.rank for event in events})
    if len(ranks) > 1:
        raise ValueError(
            f"events: expected one rank's, got those of ranks {ranks}; give trace.rank({ranks[0]})"
        )
    backwards = _intervals(events, lambda event: event.name == BACKWARD)
    if not backwards:
        raise ValueError(
            f'events: expected a span "{BACKWARD}"; put `with comm.span("{BACKWARD}"):` around loss.backward()'
        )
    waits = _intersection(_intervals(events, lambda event: event.name == WAIT), backwards)
    computing = _difference(backwards, waits)
    talking = _intervals(events, lambda event: event.lane == "comm" and event.name == "all_reduce")
    talking = _intersection(talking, backwards)
    hidden = _intersection(talking, computing)
    return Overlap(_length(computing), _length(talking), _length(hidden), _length(waits))


def _intervals(events: Iterable[Event], wanted: Callable[[Event], bool]) -> list[Interval]:
    """The times of the wanted events, those that touch made one, in order."""
    joined: list[Interval] = []
    for start, end in sorted((event.start_s, event.end_s) for event in events if wanted(event)):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _intersection(some: list[Interval], others: list[Interval]) -> list[Interval]:
    pairs = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return sorted(pair for pair in pairs if pair[0] < pair[1])


def _difference(some: list[Interval], others: list[Interval]) -> list[Interval]:
    found = []
    for start, end in some:
        for other_start, other_end in (pair for pair in others if start < pair[1] and pair[0] < end):
            found.append((start, other_start))
            start = other_end
        found.append((start, end))
    return [pair for pair in found if pair[0] < pair[1]]


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
