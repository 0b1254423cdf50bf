"""Reading a file while another process writes it."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

_TURN = 1 << 20  # bytes of one read: limits are looked at between two
_FAR = 8 * _TURN
TURNS = 10  # after so many reads nothing is left that was not skipped


class Tail:
    """The lines of a file, as they come. Works on when the file is renamed or deleted.

    `rest`: the line that is not finished yet. `grew`: whether the last `read` found anything, be it a part of a line.
    `capped`: one call reads at most 1 MiB. If more than 8 MiB wait, only the last one is read, and a line says so; a
    line of more than 1 MiB is cut. That is for writers who may be faster than the reader.
    """

    def __init__(self, path: Path, capped: bool = False) -> None:
        self.fd: int = os.open(path, os.O_RDONLY)
        self.rest, self.grew, self._capped = "", False, capped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, last: bool = False) -> list[str]:
        """The lines that were completed since the last call; `last`: at the end, what is left counts as one, too."""
        skipped, data = self._skip(), self._bytes()
        if skipped:
            data = data[data.find(b"\n") + 1 :]  # without the end of a line that was left out
        self.grew = bool(data)
        *lines, self.rest = (self.rest + self._decoder.decode(data)).split("\n")
        if self.rest and (len(self.rest) > _TURN if self._capped and data else last):
            lines, self.rest = [*lines, self.rest], ""
        return skipped + lines

    def _bytes(self) -> bytes:
        parts: list[bytes] = []
        while self.fd >= 0 and not (parts and self._capped) and (data := os.read(self.fd, _TURN)):
            parts.append(data)
        return b"".join(parts)

    def _skip(self) -> list[str]:
        """If too much waits: what is said of the part that is left out."""
        if not self._capped or self.fd < 0:
            return []
        behind = os.fstat(self.fd).st_size - os.lseek(self.fd, 0, os.SEEK_CUR)
        if behind <= _FAR:
            return []
        os.lseek(self.fd, behind - _TURN, os.SEEK_CUR)
        cut, self.rest = [self.rest] if self.rest else [], ""
        self._decoder.reset()
        return [*cut, f"… {(behind - _TURN) / 1e6:.0f} MB left out: they came faster than they can be read"]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
