"""Reading a file while another process writes it."""

from __future__ import annotations

import codecs
import os
from pathlib import Path


class Tail:
    """The lines of a file, as they come. Works on when the file is renamed or deleted."""

    def __init__(self, path: Path) -> None:
        self.fd: int = os.open(path, os.O_RDONLY)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def read(self, last: bool = False) -> list[str]:
        """The lines that were completed since the last call; `last`: what is left counts as one, too."""
        parts = []
        while self.fd >= 0 and (data := os.read(self.fd, 1 << 18)):
            parts.append(self._decoder.decode(data))
        *lines, self._rest = (self._rest + "".join(parts)).split("\n")
        if last and self._rest:
            lines, self._rest = [*lines, self._rest], ""
        return lines

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
