"""Do the two ends of a message agree? Each rank writes down what it sends and expects, and reads the other's note.

The libraries below do not check. A receiver that expects more than comes keeps a tail of old numbers; one that expects
another dtype reads the bits of another kind of number; one that expects less is ended by the library. So the n-th
message that rank a sends to rank b is compared with the n-th that b receives from a, by whichever end comes second,
before it starts. It costs a few microseconds.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Sequence
from numbers import Integral

_NUM_NOTES = 64  # of each kind remembered for each rank: many more than are ever under way
_NOTE = struct.Struct("<I i I 40s")  # number of the message, the other end, group, what
_COUNT = struct.Struct("<Q")
_KIND_BYTES = _COUNT.size + _NUM_NOTES * _NOTE.size
LOG_BYTES = 2 * _KIND_BYTES  # of one rank: what it sends, what it receives
_SEND, _RECV = 0, 1
ENDS_DIFFER = "Both ends of a message must have the same length and dtype"


class MessageLog:
    """`world_size` logs in shared memory, from `start` on; `rank` is the one this process writes."""

    def __init__(self, page: mmap.mmap, start: int, rank: int) -> None:
        self._page, self._start, self._rank = page, start, rank
        self._on = True
        self.begin_run(0)

    def begin_run(self, run: int) -> None:
        """Notes of earlier runs are no longer compared."""
        self._run = run
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}

    def stop(self) -> None:
        """This rank received from anybody: from now on nobody knows which message is whose."""
        self._on = False

    def note(self, sends: bool, ranks: Sequence[int], peer: int, what: str, channel: str = "") -> None:
        """Before a message in the group of `ranks` (global) to or from `peer`, for example "12 x float32".

        Messages are numbered for each `channel`: two threads' would mix in another order on each rank.

        Raises ValueError if `peer` is none of `ranks`, or has noted something else for this message.
        """
        if isinstance(peer, bool) or not isinstance(peer, Integral) or peer not in ranks:
            argument = "send(dst)" if sends else "recv(src)"
            raise ValueError(
                f"rank {self._rank}: {argument}: expected a rank of the group, one of {list(ranks)}, got {peer!r}"
            )
        if not self._on:
            return
        key = channel, tuple(ranks)
        if key not in self._groups:
            self._groups[key] = zlib.crc32(repr((self._run, key)).encode())
        group, kind = self._groups[key], _SEND if sends else _RECV
        number = self._numbers[group, kind, peer] = self._numbers.get((group, kind, peer), 0) + 1
        self._write(kind, number, peer, group, what)
        theirs = self._find(peer, 1 - kind, number, group)
        if theirs is not None and theirs != what:
            mine, other = ("send", "receives") if sends else ("recv", "sends")
            raise ValueError(
                f"rank {self._rank}: {mine} of {what}: rank {peer} {other} {theirs} (message {number} from rank "
                f"{self._rank if sends else peer} to rank {peer if sends else self._rank}). {ENDS_DIFFER}."
            )

    def _write(self, kind: int, number: int, peer: int, group: int, what: str) -> None:
        at = self._start + self._rank * LOG_BYTES + kind * _KIND_BYTES
        (count,) = _COUNT.unpack_from(self._page, at)
        slot = at + _COUNT.size + count % _NUM_NOTES * _NOTE.size
        _NOTE.pack_into(self._page, slot, number, peer, group, what.encode()[:40])
        _COUNT.pack_into(self._page, at, count + 1)  # last, so that a reader never meets half a note

    def _find(self, rank: int, kind: int, number: int, group: int) -> str | None:
        at = self._start + rank * LOG_BYTES + kind * _KIND_BYTES
        (count,) = _COUNT.unpack_from(self._page, at)
        # Only the newer half: the oldest places may be written anew while this rank reads.
        for index in range(count - 1, max(-1, count - 1 - _NUM_NOTES // 2), -1):
            found = _NOTE.unpack_from(self._page, at + _COUNT.size + index % _NUM_NOTES * _NOTE.size)
            if found[:3] == (number, self._rank, group):
                (now,) = _COUNT.unpack_from(self._page, at)
                return found[3].rstrip(b"\0").decode() if now - index < _NUM_NOTES else None
        return None
