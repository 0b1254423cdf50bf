"""What the workers write, read from their log files and shown in the cell that waits for them.

Everything is read and printed by the thread that calls: a notebook shows it where that thread runs a cell.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from course_lib.runtime.torchrun.diary import Worker
from course_lib.runtime.torchrun.tail import Tail

_NOISE = re.compile(r"socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's own mark on the lines of a traceback


class Relay:
    """Shows lines as `show` says: "live", "grouped" (rank by rank, at the end) or "none"."""

    def __init__(self, show: str, named: Callable[[str], str]) -> None:
        self.show, self._named = show, named
        self._tails: list[tuple[Worker, bool, Tail]] = []
        self._finished = False

    def follow(self, worker: Worker, directory: Path) -> None:
        """From now on read the worker's two files in `directory`."""
        for is_error, stream in ((False, "stdout"), (True, "stderr")):
            try:
                self._tails.append((worker, is_error, Tail(directory / f"{worker.pid}.{stream}")))
            except FileNotFoundError:
                pass  # torchrun was told not to write it

    def pump(self) -> bool:
        """Read what is new; True if there was anything."""
        found = False
        for worker, is_error, tail in self._tails:
            lines = self._clean(tail.read(last=worker.gone is not None))
            worker.lines += [(is_error, line) for line in lines]
            found = found or bool(lines)
            if self.show == "live":
                _write(is_error, [f"[rank {worker.rank}] {line}" for line in lines])
        return found

    def raw(self, worker: Worker) -> list[str]:
        """What is new in the worker's stderr, not shown to anybody."""
        return [
            line
            for who, is_error, tail in self._tails
            if who is worker and is_error
            for line in tail.read(True)
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
        """Close the files, and show what "grouped" kept back."""
        for _, _, tail in self._tails:
            tail.close()
        self._tails.clear()
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
    if lines:
        target: TextIO = sys.stderr if is_error else sys.stdout
        target.write("".join(line + "\n" for line in lines))
        target.flush()
