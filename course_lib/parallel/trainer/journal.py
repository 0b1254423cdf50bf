"""What a run writes down while it trains: which samples each step took (the audit), and when things happened (events).

Both are files of JSON lines, to which every rank and every restart appends. A line is one write to a file opened for
appending, so the lines of several processes do not mix, and a killed process leaves only whole ones.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil


def restart_count() -> int:
    """How often torchrun has restarted the workers; 0 outside torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def process_started() -> float:
    """The time.time() at which this process began, before it had imported anything; to about 0.01 s on Linux."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, AttributeError):  # no Linux
        return psutil.Process().create_time()


class Journal:
    """`audit`, `events`: files to append to; None: not written. Raises ValueError for a file that cannot be written."""

    def __init__(
        self, rank: int = 0, *, audit: Path | str | None = None, events: Path | str | None = None
    ) -> None:
        self.rank, self.restart = rank, restart_count()
        self._audit, self._events = _open("audit", audit), _open("events", events)

    def event(self, name: str, when: float | None = None, **detail: Any) -> None:
        """`name` happened at `when` (a time.time(); None: now)."""
        line = {"time": time.time() if when is None else when, "name": name, "rank": self.rank}
        _append(self._events, line | {"restart": self.restart} | detail)

    def begin(self, epoch: int, step: int, world_size: int) -> None:
        """The run begins, or goes on, with this step of this epoch. Rank 0 says it for all, before the first step."""
        if self.rank == 0:
            line = {
                "begin": True,
                "restart": self.restart,
                "epoch": epoch,
                "step": step,
                "world_size": world_size,
            }
            _append(self._audit, line)

    def step(self, epoch: int, step: int, indices: list[int], loss: float) -> None:
        """A completed step: this rank's samples, and the mean loss over all ranks."""
        line = {"restart": self.restart, "epoch": epoch, "step": step, "rank": self.rank, "indices": indices}
        _append(self._audit, line | {"loss": loss})


def _open(what: str, path: Path | str | None) -> int | None:
    if path is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(
            f"{what}: expected a file that can be written, got {path}: {error.strerror}"
        ) from error


def _append(file: int | None, line: dict[str, Any]) -> None:
    if file is not None:
        os.write(file, (json.dumps(line) + "\n").encode())
