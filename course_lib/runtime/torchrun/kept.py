"""The lines of one worker, of which not too many are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

_MOST = 4_000_000  # characters at the beginning, and as many at the end
_OF_A_LINE = 100  # what Python needs for one, about


class Kept:
    """(is stderr, line) pairs, in the order in which they were read: all, or else the first and the last.

    A pair in between then says how many were left out.
    """

    def __init__(self) -> None:
        self._head: list[tuple[bool, str]] = []
        self._tail: deque[tuple[bool, str]] = deque()
        self._head_size = self._tail_size = self.left_out = 0

    def __iadd__(self, lines: Iterable[tuple[bool, str]]) -> Kept:
        for line in lines:
            size = len(line[1]) + _OF_A_LINE
            if not self._tail and self._head_size + size <= _MOST:
                self._head.append(line)
                self._head_size += size
                continue
            self._tail.append(line)
            self._tail_size += size
            while self._tail_size > _MOST and len(self._tail) > 1:
                self._tail_size -= len(self._tail.popleft()[1]) + _OF_A_LINE
                self.left_out += 1
        return self

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def __iter__(self) -> Iterator[tuple[bool, str]]:
        yield from self._head
        if self.left_out:
            yield (
                False,
                f"… {self.left_out} lines left out; the log files, which log_dir=... keeps, have them all",
            )
        yield from self._tail
