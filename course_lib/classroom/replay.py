"""A ring all-reduce played again from what its ranks wrote down.

A ledger says who sent how many bytes to whom, in which order. It does not say which chunk that was. The
ring's order says it (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009), so the replay claims for each row which chunk it carried and holds the claim against the
row: the peer, the bytes sent and the bytes received must be that chunk's. Give the run chunks of different
sizes (a length that N does not divide) and a wrong order shows, too; with equal chunks, only a wrong
neighbour, size or number of messages does.

Chunks: with N ranks, chunk r is the one whose sum rank r owns after the first phase, as in torch's
reduce_scatter.

    step s of reduce-scatter, s = 0 … N-2: rank r sends chunk r-1-s to rank r+1, which adds it to its own
    step s of all-gather,     s = 0 … N-2: rank r sends chunk r-s   to rank r+1, which keeps it as it is

Ranks and chunks are counted modulo N.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

REDUCE_SCATTER, ALL_GATHER = "reduce-scatter", "all-gather"
Held = tuple[tuple[frozenset[int], ...], ...]  # [rank][chunk] -> ranks whose values are in it


class LedgerRow(Protocol):
    """What the replay reads of a `comm.ledger.Row`."""

    @property
    def op(self) -> str: ...
    @property
    def peer(self) -> int | None: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...


class NotARing(ValueError):
    """The ledgers do not fit a ring all-reduce. The message names rank, step, the expected and the found."""


@dataclass(frozen=True)
class Move:
    """One message: `chunk` goes from rank `source` to rank `to`."""

    source: int
    to: int
    chunk: int
    num_bytes: int


@dataclass(frozen=True)
class Step:
    """All messages that travel at once, and what every rank holds after them. Step 0 is the start: none."""

    number: int
    phase: str
    moves: tuple[Move, ...]
    held: Held

    @property
    def title(self) -> str:
        return f"step {self.number}: {self.phase}" if self.moves else "start"


@dataclass(frozen=True)
class Replay:
    """`steps[0]` is the start, `steps[1:]` the 2(N-1) steps. `chunk_bytes[c]` is the size of chunk c."""

    chunk_bytes: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.chunk_bytes)

    @property
    def bytes_sent(self) -> tuple[int, ...]:
        """Bytes each rank sent in the whole run, in rank order."""
        moves = [move for step in self.steps for move in step.moves]
        return tuple(sum(m.num_bytes for m in moves if m.source == rank) for rank in range(self.num_ranks))

    def is_sum(self, step: int, rank: int, chunk: int) -> bool:
        """Whether `rank` holds the finished sum of `chunk` after `step`."""
        return len(self.steps[step].held[rank][chunk]) == self.num_ranks


def label(contributions: Iterable[int], num_ranks: int) -> str:
    """Text for a chunk with these ranks' values: "0+1"; "sum" when all are in; "3/8" when it is long."""
    ranks = sorted(contributions)
    if len(ranks) == num_ranks:
        return "sum" if num_ranks > 1 else str(ranks[0])
    if len(ranks) > (3 if num_ranks <= 4 else 2):
        return f"{len(ranks)}/{num_ranks}"
    return "+".join(map(str, ranks))


def replay_ring(ledgers: Sequence[Iterable[LedgerRow]], chunk_bytes: Sequence[int]) -> Replay:
    """Replay one ring all-reduce of N ranks from their ledgers.

    ledgers: the rows of each rank, in rank order (`results.ledger`), of a run that did this and nothing else
    on the wire; a tensor small enough not to be cut into segments. chunk_bytes: size of each of the N chunks
    in bytes (`chunk_sizes(length, N)` times the bytes of an element). Raises NotARing where a row contradicts
    the ring, ValueError if the numbers of ledgers and chunks differ.
    """
    size = len(ledgers)
    if size == 0 or len(chunk_bytes) != size:
        raise ValueError(f"a ring of N ranks has N ledgers and N chunks: got {size} and {len(chunk_bytes)}")
    rows = [_exchanges(rank, ledger, size) for rank, ledger in enumerate(ledgers)]
    held = [[frozenset({rank})] * size for rank in range(size)]
    steps = [Step(0, "start", (), _freeze(held))]
    for number in range(1, 2 * (size - 1) + 1):
        moves = tuple(_claim(rank, number, size, chunk_bytes) for rank in range(size))
        for move in moves:
            _check(move, number, rows[move.source][number - 1], rows[move.to][number - 1])
        phase = REDUCE_SCATTER if number < size else ALL_GATHER
        before = _freeze(held)  # all messages of a step leave before any arrives
        for move in moves:
            own = before[move.to][move.chunk] if phase == REDUCE_SCATTER else frozenset()
            held[move.to][move.chunk] = own | before[move.source][move.chunk]
        steps.append(Step(number, phase, moves, _freeze(held)))
    return Replay(tuple(chunk_bytes), tuple(steps))


def _freeze(held: list[list[frozenset[int]]]) -> Held:
    return tuple(tuple(chunks) for chunks in held)


def _claim(rank: int, number: int, size: int, chunk_bytes: Sequence[int]) -> Move:
    """The message that `rank` sends in step `number` (from 1) of a ring."""
    chunk = (rank - number if number < size else rank - (number - size)) % size
    return Move(rank, (rank + 1) % size, chunk, chunk_bytes[chunk])


def _exchanges(rank: int, ledger: Iterable[LedgerRow], size: int) -> list[LedgerRow]:
    rows = [row for row in ledger if row.op == "exchange" or row.bytes_sent or row.bytes_received]
    for row in rows:
        if row.op != "exchange":
            raise NotARing(
                f"rank {rank}: the ledger holds a {row.op!r} that moved "
                f"{max(row.bytes_sent, row.bytes_received)} B. A ring is made of exchanges alone: "
                "replay a launch that did one ring all-reduce and nothing else."
            )
    if len(rows) != 2 * (size - 1):
        raise NotARing(
            f"rank {rank}: expected 2(N-1) = {2 * (size - 1)} exchanges for N = {size}, found {len(rows)}. "
            "Replay one ring all-reduce of a tensor small enough not to be cut into segments."
        )
    return rows


def _check(move: Move, number: int, sent: LedgerRow, received: LedgerRow) -> None:
    where = (
        f"step {number}, chunk {move.chunk} ({move.num_bytes} B) from rank {move.source} to rank {move.to}"
    )
    if sent.peer is not None and sent.peer != move.to:
        raise NotARing(
            f"{where}: rank {move.source} sent to rank {sent.peer}. In a ring it sends to its next."
        )
    if sent.bytes_sent != move.num_bytes:
        raise NotARing(f"{where}: rank {move.source} sent {sent.bytes_sent} B{_hint(sent.bytes_sent, move)}.")
    if received.bytes_received != move.num_bytes:
        raise NotARing(f"{where}: rank {move.to} received {received.bytes_received} B.")


def _hint(num_bytes: int, move: Move) -> str:
    return ": more than the chunk, so more than a ring needs" if num_bytes > move.num_bytes else ""
