"""The board: one shared page on which every rank writes what it is waiting for.

A rank that hangs cannot be asked what it is doing. So each rank writes it down *before* it starts to wait, in memory
that the launcher shares: the collectives it entered, numbered per group, and the wait it is in now. From this page
the launcher tells a rank that computes from a rank that waits, and says which collectives do not match.

A rank also reads the page. Ranks that enter *different* collectives under the same number would send each other bytes
that mean something else: some libraries then crash, some return wrong values. A rank that sees such a mismatch does not
start its transfer; it waits where it is until the launcher's timeout reports it.

Writing costs about two microseconds. Each rank writes only its own part, so only its own threads wait for each other.
`NullBoard` does nothing: it is used where no launcher watches, for example under torchrun.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from course_lib.comm.message_log import LOG_BYTES, MessageLog

_NUM_WAITS = 4  # waits written at once by one rank: one for each of its threads
_NUM_RECORDS = 64  # collectives remembered for each rank
_WAIT = struct.Struct("<d i 44s")  # since, peer, operation
_RECORD = struct.Struct("<Q I d d 40s 64s")  # number in its group, group, start, end, operation, signature
_COUNT = struct.Struct("<Q")  # collectives entered so far
_RANK_BYTES = _COUNT.size + _NUM_WAITS * _WAIT.size + _NUM_RECORDS * _RECORD.size


@dataclass(frozen=True)
class Wait:
    """A communication a rank is waiting in: operation, peer (a rank, or None) and since when (`time.monotonic`)."""

    op: str
    peer: int | None
    since: float


@dataclass(frozen=True)
class Entered:
    """A collective a rank entered: its number within its group (from 1), and its end (0.0 while inside)."""

    number: int
    group: int
    op: str
    signature: str
    start: float
    end: float

    @property
    def what(self) -> str:
        return f"{self.op} of {self.signature}" if self.signature else self.op


class NullBoard:
    """The board when nobody watches."""

    @contextmanager
    def wait(self, op: str, peer: int | None = None) -> Iterator[None]:
        yield

    @contextmanager
    def collective(
        self, op: str, ranks: Sequence[int], signature: str = "", channel: str = ""
    ) -> Iterator[None]:
        yield

    def message(self, sends: bool, ranks: Sequence[int], peer: int, what: str, channel: str = "") -> None:
        pass


class Board:
    """`world_size` parts of shared memory; `rank` is the part this process writes (None: it only reads).

    The launcher calls `Board.create` and hands the file to its ranks, which call `Board(fd, world_size, rank)`.
    """

    def __init__(self, fd: int, world_size: int, rank: int | None = None) -> None:
        self.fd, self.world_size, self.rank = fd, world_size, rank
        self._page = mmap.mmap(fd, world_size * (_RANK_BYTES + LOG_BYTES))
        self.messages = MessageLog(self._page, world_size * _RANK_BYTES, -1 if rank is None else rank)
        self.run = 0  # of a pool: entries of one run are compared among themselves only
        self._numbers: dict[int, int] = {}  # group -> collectives entered in it
        self._threads: dict[int, int] = {}  # thread -> which of the waits it writes
        self._depth = threading.local()
        self._writing = threading.Lock()

    @classmethod
    def create(cls, world_size: int) -> Board:
        with tempfile.TemporaryFile() as file:
            file.truncate(world_size * (_RANK_BYTES + LOG_BYTES))
            return cls(os.dup(file.fileno()), world_size)

    def close(self) -> None:
        self._page.close()
        os.close(self.fd)

    # --- a rank writes

    def begin_run(self, run: int) -> None:
        """Number the collectives afresh; entries of earlier runs of a pool are no longer compared."""
        self.run = run
        self._numbers.clear()
        self.messages.begin_run(run)

    def message(self, sends: bool, ranks: Sequence[int], peer: int, what: str, channel: str = "") -> None:
        """Note a message to or from `peer`; ValueError if the other end has noted another one (see `message_log`)."""
        with self._writing:
            self.messages.note(sends, ranks, peer, what, channel)

    @contextmanager
    def wait(self, op: str, peer: int | None = None) -> Iterator[None]:
        """Everything inside is waiting for `op`, with `peer` (a global rank) if there is one."""
        assert self.rank is not None
        slot = self._threads.setdefault(threading.get_ident(), len(self._threads) % _NUM_WAITS)
        at = self.rank * _RANK_BYTES + _COUNT.size + slot * _WAIT.size
        if self._page[at : at + 8] != bytes(8):  # inside another wait, which says more about why
            yield
            return
        _WAIT.pack_into(self._page, at, time.monotonic(), -1 if peer is None else peer, op.encode()[:44])
        try:
            yield
        finally:
            self._page[at : at + _WAIT.size] = bytes(_WAIT.size)

    @contextmanager
    def collective(
        self, op: str, ranks: Sequence[int], signature: str = "", channel: str = ""
    ) -> Iterator[None]:
        """Everything inside is the collective `op` over `ranks` (global); of nested ones only the outermost is written.

        `signature` describes what must be the same on all ranks, for example "12 x float32". Collectives that another
        thread enters at the same time, on the same ranks, need a `channel` of their own: numbers are per channel.
        """
        if getattr(self._depth, "value", 0):
            yield
            return
        self._depth.value = 1
        at = self._write_entry(op, ranks, signature, channel)
        try:
            yield
        finally:
            self._depth.value = 0
            struct.pack_into("<d", self._page, at + 20, time.monotonic())

    def _write_entry(self, op: str, ranks: Sequence[int], signature: str, channel: str) -> int:
        assert self.rank is not None
        group = zlib.crc32(repr((self.run, tuple(ranks), channel)).encode())
        base = self.rank * _RANK_BYTES
        name, sign = op.encode()[:40], signature.encode()[:64]
        with self._writing:
            number = self._numbers[group] = self._numbers.get(group, 0) + 1
            (count,) = _COUNT.unpack_from(self._page, base)
            at = self._record_at(self.rank, count)
            _RECORD.pack_into(self._page, at, number, group, time.monotonic(), 0.0, name, sign)
            _COUNT.pack_into(self._page, base, count + 1)  # last, so that a reader never meets half an entry
        if self._somebody_differs(ranks, number, group, _text(name), _text(sign)):
            with self.wait(op):
                while True:  # the launcher's timeout reports this rank and ends it
                    time.sleep(0.05)
        return at

    def _somebody_differs(
        self, ranks: Sequence[int], number: int, group: int, op: str, signature: str
    ) -> bool:
        for other in ranks:
            if other == self.rank:
                continue
            for entry in self._latest(other, 4):
                if (entry.number, entry.group) == (number, group):
                    if (entry.op, entry.signature) != (op, signature):
                        return True
                    break
        return False

    # --- the launcher reads

    def waits(self, rank: int) -> list[Wait]:
        """The waits `rank` is in now, the longest first."""
        at = rank * _RANK_BYTES + _COUNT.size
        rows = [_WAIT.unpack_from(self._page, at + slot * _WAIT.size) for slot in range(_NUM_WAITS)]
        waits = [Wait(_text(op), peer if peer >= 0 else None, since) for since, peer, op in rows if since]
        return sorted(waits, key=lambda wait: wait.since)

    def collectives(self, rank: int) -> list[Entered]:
        """The last collectives `rank` entered, the newest first."""
        return self._latest(rank, _NUM_RECORDS)

    def num_collectives(self, rank: int) -> int:
        """How many collectives `rank` has entered."""
        return _COUNT.unpack_from(self._page, rank * _RANK_BYTES)[0]

    def _record_at(self, rank: int, index: int) -> int:
        return (
            rank * _RANK_BYTES + _COUNT.size + _NUM_WAITS * _WAIT.size + (index % _NUM_RECORDS) * _RECORD.size
        )

    def _latest(self, rank: int, most: int) -> list[Entered]:
        count = self.num_collectives(rank)
        found = []
        for index in range(count - 1, max(count - 1 - most, -1), -1):
            number, group, start, end, op, sign = _RECORD.unpack_from(
                self._page, self._record_at(rank, index)
            )
            found.append(Entered(number, group, _text(op), _text(sign), start, end))
        return found


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
