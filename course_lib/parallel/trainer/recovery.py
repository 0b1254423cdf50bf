"""Reading the events: where the time from a fault to the next training step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course_lib.parallel.trainer.journal import read_lines

STAGES = {
    "process start": "detection and rendezvous",
    "torch imported": "import",
    "process group ready": "process group",
    "model ready": "model and optimizer",
    "snapshot loaded": "snapshot",
    "first step done": "first step",
}
"""Event -> the part of the recovery that ends with it."""


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """The events of all ranks and restarts, in order of time: dicts with time, name, rank, restart and details.

    Raises ValueError, which names the line, for a file that no Trainer wrote.
    """
    lines = read_lines(path, "events", ("time", "name", "rank", "restart"))
    return sorted(lines, key=lambda event: event["time"])


def recovery(
    events: Path | str | list[dict[str, Any]], killed_at: float, noticed_at: float | None = None
) -> dict[str, float]:
    """The parts, in seconds, from `killed_at` (a time.time()) to the end of the first training step after it.

    A part ends when the slowest rank is through, so the parts add up to the whole. "detection and rendezvous" is what
    the agents do: notice, end the other workers, meet again, start new ones. With `noticed_at`, the time at which the
    agent noticed, it is split in two. Raises ValueError if no worker came back, or none finished a step, or
    `noticed_at` lies before the fault.
    """
    if noticed_at is not None and not noticed_at >= killed_at:
        raise ValueError(
            f"noticed_at: expected a time.time() not before the fault, at killed_at={killed_at}, got {noticed_at}; "
            "take both from the same clock: killed_at from before the kill, not from after it"
        )
    if not isinstance(events, list):
        events = read_events(events)
    later = [event for event in events if event["time"] > killed_at]
    restart = min((event["restart"] for event in later if event["name"] == "process start"), default=None)
    ended = {}
    for name in STAGES:
        times = [event["time"] for event in later if event["name"] == name and event["restart"] == restart]
        if not times:
            raise ValueError(
                f"events: no {name!r} after {killed_at}: no worker came that far after the fault"
            )
        ended[name] = max(times)
    parts, before = {}, killed_at
    for name, part in STAGES.items():
        if name == "process start" and noticed_at is not None:
            parts["detection"], part, before = noticed_at - killed_at, "rendezvous", noticed_at
        parts[part], before = ended[name] - before, ended[name]
    return parts
