"""What a run writes down while it trains: which samples each step took (the audit), and when things happened (events).

Both are files of JSON lines, to which every rank and every restart appends. A line is one write to a file opened for
appending, so the lines of several processes do not mix, and a killed process leaves only whole ones. They are for
those who look on: if such a file cannot be written any more, say for want of space, training goes on without it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil


def restart_count() -> int:
    """How often torchrun has restarted the workers; 0 outside torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def run_id() -> str:
    """The name of torchrun's job, the same in all its restarts; "" outside torchrun, or if nobody gave it a name.

    The restart count cannot tell one job from the next: each agent counts for itself, and only failures of its own
    workers. When a node joins, or a worker of another node fails, new workers come with the old count.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name  # torchrun's default for --rdzv-id


def process_started() -> float:
    """The time.time() at which this process began, before it had imported anything; to about 0.01 s on Linux."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, AttributeError):  # no Linux
        return psutil.Process().create_time()


class Journal:
    """`audit`, `events`: files to append to; None: not written. Raises ValueError for a file that cannot be opened.

    If writing fails later, it says so once on stderr and leaves that file alone: it then lacks this rank's further
    lines, and may end in half a line, which `read_audit` and `read_events` name. Training goes on.
    """

    def __init__(
        self, rank: int = 0, *, audit: Path | str | None = None, events: Path | str | None = None
    ) -> None:
        self.rank, self.restart = rank, restart_count()
        self._files = {"audit": _open("audit", audit), "events": _open("events", events)}

    def event(self, name: str, when: float | None = None, **detail: Any) -> None:
        """`name` happened at `when` (a time.time(); None: now)."""
        line = {"time": time.time() if when is None else when, "name": name, "rank": self.rank}
        self._append("events", line | {"restart": self.restart} | detail)

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
            self._append("audit", line)

    def step(self, epoch: int, step: int, indices: list[int], loss: float) -> None:
        """A completed step: this rank's samples, and the mean loss over all ranks."""
        line = {"restart": self.restart, "epoch": epoch, "step": step, "rank": self.rank, "indices": indices}
        self._append("audit", line | {"loss": loss})

    def _append(self, what: str, line: dict[str, Any]) -> None:
        file, data = self._files[what], (json.dumps(line) + "\n").encode()
        if file is None:
            return
        try:
            written = os.write(file, data)
            why = "" if written == len(data) else f"{written} of {len(data)} bytes were written"
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            os.close(file)
            self._files[what] = None
            print(
                f"WARNING: rank {self.rank}: {what}: no line can be written any more ({why}); the file is incomplete. "
                "Training goes on without it. Make room, and begin another file with the next run.",
                file=sys.stderr,
                flush=True,
            )


def _open(what: str, path: Path | str | None) -> int | None:
    if path is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(
            f"{what}: expected a file that can be written, got {path}: {error.strerror}"
        ) from error


def read_lines(path: Path | str, what: str, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The lines of a file that a Journal wrote as its `what`. ValueError for the first that lacks one of `names`."""
    for number, text in enumerate(Path(path).read_text(errors="replace").splitlines(), start=1):
        try:
            line = json.loads(text)
            _ = [line[name] for name in names]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{what}: line {number} of {path} is none that a Trainer writes: {text[:60]!r}. "
                f"Give the file of `--{what}`; after a full disk or a power cut it may hold half a line: remove it."
            ) from error
        yield line
