"""The trace: who did what, from when to when, on one clock for all ranks.

A ledger counts; a trace shows *when*. Whether communication hides behind computation is a question about two
intervals that overlap, so every event has a start and an end, measured in seconds since the launch began. All
ranks of one host read the same system clock (`time.monotonic`), so their events can be drawn above each
other.

`Trace.save` writes the Trace Event Format that Chrome's `about:tracing` and https://ui.perfetto.dev open.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.comm.ledger import Ledger


@dataclass
class Event:
    """One interval on a rank's timeline.

    `lane` separates what runs at the same time: "compute", "comm", ...
    """

    rank: int
    name: str
    start_s: float
    end_s: float
    lane: str = "compute"
    detail: dict[str, Any] = field(default_factory=dict)


class Trace:
    """A list of events. A rank's Communicator holds its own; `Trace.combine` makes one of all ranks'."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events = list(events)

    @classmethod
    def combine(cls, traces: Iterable[Trace], ledgers: Iterable[Ledger] = ()) -> Trace:
        """One trace of all ranks, sorted by start.

        Row i of `ledgers` is rank i's and becomes its lane "comm".
        """
        combined = cls(event for trace in traces for event in trace)
        for rank, ledger in enumerate(ledgers):
            combined.add_ledger(rank, ledger)
        combined._events.sort(key=lambda event: event.start_s)
        return combined

    def add(self, event: Event) -> None:
        self._events.append(event)

    def add_ledger(self, rank: int, ledger: Ledger) -> None:
        """Every row of `rank`'s ledger as an event of lane "comm"."""
        for row in ledger:
            detail = {
                "peer": row.peer,
                "bytes_sent": row.bytes_sent,
                "bytes_received": row.bytes_received,
                "messages": row.messages,
                "exact": row.exact,
            }
            self.add(Event(rank, row.op, row.start_s, row.end_s, "comm", detail))

    def clear(self) -> None:
        self._events.clear()

    def rank(self, rank: int) -> list[Event]:
        """The events of one rank."""
        return [event for event in self._events if event.rank == rank]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def __repr__(self) -> str:
        ranks = len({event.rank for event in self._events})
        return f"Trace({len(self)} events of {ranks} ranks)"

    def save(self, path: str | Path) -> Path:
        """Write the trace as JSON for Chrome or Perfetto: a process for each rank, a thread for each lane."""
        lanes = sorted({(event.rank, event.lane) for event in self._events})
        tids = {lane: tid for tid, lane in enumerate(dict.fromkeys(lane for _, lane in lanes))}
        events: list[dict[str, Any]] = []
        for rank in sorted({rank for rank, _ in lanes}):
            events.append(_metadata("process_name", rank, 0, f"rank {rank}"))
        for rank, lane in lanes:
            events.append(_metadata("thread_name", rank, tids[lane], lane))
        for event in self._events:
            times = {"ts": event.start_s * 1e6, "dur": (event.end_s - event.start_s) * 1e6}  # microseconds
            place = {"pid": event.rank, "tid": tids[event.lane]}
            events.append({"name": event.name, "ph": "X", **times, **place, "args": event.detail})
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, default=str))
        return path


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
