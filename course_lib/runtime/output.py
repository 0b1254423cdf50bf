"""The output of ranks: read from their pipes in the kernel's main thread, shown in the cell that launched them."""

from __future__ import annotations

import codecs
import os
import re
import sys
from typing import Any, TextIO

from tqdm import tqdm

SHOW = ("live", "grouped", "none")
# torch looks up a name for each address that connects to its store; virtual hosts have none, and need none.
_NOISE = re.compile(r"socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved")


class Stream:
    """One pipe of one rank, as lines."""

    def __init__(self, fd: int, rank: int, is_error: bool) -> None:
        os.set_blocking(fd, False)
        self.fd, self.rank, self.is_error, self.open = fd, rank, is_error, True
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def fileno(self) -> int:
        return self.fd

    def read(self) -> list[str] | None:
        """The lines that are complete by now, or None if nothing is there to read."""
        try:
            data = os.read(self.fd, 1 << 18)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self.open = bool(data)
        *lines, self._rest = (self._rest + self._decoder.decode(data, final=not data)).split("\n")
        return lines if data else lines + self.take_rest()

    def take_rest(self) -> list[str]:
        rest, self._rest = self._rest, ""
        return [rest] if rest else []

    def close(self) -> None:
        os.close(self.fd)


class Output:
    """Keeps what each rank wrote; shows it as `show` says: "live", "grouped" (rank by rank, at the end) or "none"."""

    def __init__(self, world_size: int, show: str) -> None:
        self.show = show
        self.lines: list[list[tuple[bool, str]]] = [[] for _ in range(world_size)]
        self._bars: dict[str, tqdm] = {}
        self._finished = False

    def add(self, stream: Stream, lines: list[str] | None) -> None:
        # A carriage return starts the line anew, as on a terminal: what a progress bar wrote before is gone.
        rows = [
            (stream.is_error, line.rstrip("\r").rpartition("\r")[2])
            for line in lines or ()
            if not _NOISE.search(line)
        ]
        self.lines[stream.rank] += rows
        if self.show == "live":
            self._write(stream.rank, rows)

    def text(self, rank: int) -> str:
        """All that `rank` wrote, stdout and stderr in the order in which they arrived."""
        return "".join(line + "\n" for _, line in self.lines[rank])

    def finish(self) -> None:
        """Close the progress bars, and show what "grouped" kept back."""
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()
        if self.show == "grouped" and not self._finished:
            for rank, rows in enumerate(self.lines):
                self._write(rank, [row for row in rows if not row[0]])
                self._write(rank, [row for row in rows if row[0]])
        self._finished = True

    def progress(self, message: dict[str, Any]) -> None:
        """A step of rank 0's `comm.progress`: {"desc", "n", "total", "done"}."""
        if self.show == "none":
            return
        name = message["desc"]
        bar = self._bars.get(name)
        if bar is None:
            # Plain text, not a widget: it stays readable in a stored notebook.
            bar = self._bars[name] = tqdm(
                total=message["total"], desc=name or None, file=sys.stdout, ncols=90, ascii=" ="
            )
        bar.update(message["n"] - bar.n)
        if message["done"]:
            self._bars.pop(name).close()

    def _write(self, rank: int, rows: list[tuple[bool, str]]) -> None:
        for bar in self._bars.values():
            bar.clear()
        start = 0
        for end in range(1, len(rows) + 1):  # one write for each run of lines of one kind
            if end == len(rows) or rows[end][0] != rows[start][0]:
                target: TextIO = sys.stderr if rows[start][0] else sys.stdout
                target.write("".join(f"[rank {rank}] {line}\n" for _, line in rows[start:end]))
                target.flush()
                start = end
        for bar in self._bars.values():
            bar.refresh()
