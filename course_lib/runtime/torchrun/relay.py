"""What the workers write, read from their log files and shown in the cell that waits for them.

Everything is read and printed by the thread that calls: a notebook shows it where that thread runs a cell.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from course_lib.runtime.torchrun.diary import Worker
from course_lib.runtime.torchrun.tail import TURNS, Tail

_NOISE = re.compile(r"socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's own mark on the lines of a traceback

_UNFINISHED_S = 0.5  # after which a line that does not end is shown: dots, a progress bar
_MOST_AT_ONCE = 2000  # lines: a notebook that gets more has no time for anything else


@dataclass
class _Stream:
    """stdout or stderr of a worker. `shown`: how much of the unfinished line has been shown; `since`: when the rest of
    it came (a time.monotonic())."""

    worker: Worker
    is_error: bool
    tail: Tail
    shown: int = 0
    since: float | None = None

    def to_show(self, lines: list[str]) -> list[str]:
        """What `tail` has just read, without what was shown before, and with an unfinished line when it is time."""
        show, now = list(lines), time.monotonic()
        if show:
            show[0] = show[0][self.shown :]
            show = show[1:] if self.shown and not show[0].strip("\r") else show
            self.shown, self.since = 0, None
        waiting = self.tail.rest[self.shown :]
        if not waiting:
            self.since = None
        elif self.since is None:
            self.since = now
        elif now - self.since >= _UNFINISHED_S:
            show, self.shown, self.since = [*show, waiting], len(self.tail.rest), None
        return show


class Relay:
    """Shows lines as `show` says: "live", "grouped" (rank by rank, at the end) or "none"."""

    def __init__(self, show: str, named: Callable[[str], str]) -> None:
        self.show, self._named = show, named
        self._streams: list[_Stream] = []
        self._finished = False

    def follow(self, worker: Worker, directory: Path) -> None:
        """From now on read the worker's two files in `directory`."""
        for is_error, stream in ((False, "stdout"), (True, "stderr")):
            try:
                tail = Tail(directory / f"{worker.pid}.{stream}", capped=True)
                self._streams.append(_Stream(worker, is_error, tail))
            except FileNotFoundError:
                pass  # torchrun was told not to write it

    def pump(self) -> bool:
        """Read what is new, of much only a part; True if there was anything, be it a part of a line."""
        found = False
        for stream in self._streams:
            worker = stream.worker
            lines = stream.tail.read(last=worker.gone is not None)
            worker.lines += [(stream.is_error, line) for line in self._clean(lines)]
            found = found or stream.tail.grew
            if self.show == "live":
                shown = self._clean(stream.to_show(lines))
                _write(stream.is_error, [f"[rank {worker.rank}] {line}" for line in shown])
        return found

    def raw(self, worker: Worker) -> list[str]:
        """What is new in the worker's stderr, not shown to anybody."""
        return [
            line
            for stream in self._streams
            if stream.worker is worker and stream.is_error
            for line in stream.tail.read(True)
        ]

    def name(self, file: str) -> str:
        return self._named(file)

    def agent(self, node: int, lines: list[str]) -> None:
        """Lines that an agent wrote; only live, since their order and number differ from run to run."""
        if self.show == "live":
            who = f"agent {node}" if node >= 0 else "store"
            _write(True, [f"[{who}] {self._named(line)}" for line in lines])

    def say(self, text: str) -> None:
        if self.show == "live":
            _write(False, [f"[torchrun] {text}"])

    def finish(self, workers: list[Worker]) -> None:
        """Read what is left, close the files, and show what "grouped" kept back. Nobody writes any more."""
        for _ in range(TURNS):
            if not self.pump():
                break
        for stream in self._streams:
            stream.tail.close()
        self._streams.clear()
        if self.show == "grouped" and not self._finished:
            # The sorting is stable: of one rank, the earlier worker comes first.
            for worker in sorted(workers, key=lambda worker: worker.rank):
                for kind in (False, True):
                    _write(
                        kind,
                        [f"[rank {worker.rank}] {text}" for is_err, text in worker.lines if is_err == kind],
                    )
        self._finished = True

    def _clean(self, lines: list[str]) -> list[str]:
        # A carriage return starts the line anew, as on a terminal: what a progress bar wrote before is gone.
        kept = (line.rstrip("\r").rpartition("\r")[2] for line in lines if not _NOISE.search(line))
        return [self._named(_RANK.sub("", line)) for line in kept]


def _write(is_error: bool, lines: list[str]) -> None:
    if left_out := max(len(lines) - _MOST_AT_ONCE, 0):
        half = _MOST_AT_ONCE // 2
        lines = [*lines[:half], f"… {left_out} lines not shown; `output` has more", *lines[-half:]]
    if lines:
        target: TextIO = sys.stderr if is_error else sys.stdout
        target.write("".join(line + "\n" for line in lines))
        target.flush()
