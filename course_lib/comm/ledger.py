"""The ledger: one row for each communication a rank took part in, with its bytes counted.

A claim about communication ("a ring sends 2·(N-1)/N·S bytes") is worth little until somebody counts. The
Communicator writes a row for every message it sends or receives, so a claim becomes an assertion: predict
with `plan.costs`, run, compare with the ledger's totals.

What a row counts is the payload: the elements of the tensor, not the headers that the transport adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_SHOWN = 40  # rows printed before the middle is left out


@dataclass(frozen=True, slots=True)
class Row:
    """One operation as one rank saw it.

    `peer` is a global rank: the one sent to (for a recv, the one received from; None for a collective of
    torch). `messages` counts what this rank *sent*: 1 for a send and for an exchange, 0 for a recv. An empty
    message is a message. Times are seconds since the launch began, on one clock for all ranks; on a GPU they
    are the times of the host's calls. `exact` is False for torch's own collectives: nobody can look inside
    them, so their traffic is the formula of a bandwidth-optimal algorithm and not a count. `group` holds the
    global ranks that took part.
    """

    op: str
    peer: int | None
    bytes_sent: int
    bytes_received: int
    messages: int
    start_s: float
    end_s: float
    exact: bool = True
    group: tuple[int, ...] | None = None


class Ledger:
    """All rows of one rank, in the order in which the operations ended."""

    def __init__(self, rows: list[Row] | None = None) -> None:
        self._rows: list[Row] = [] if rows is None else rows

    def add(self, row: Row) -> None:
        self._rows.append(row)

    def clear(self) -> None:
        self._rows.clear()

    @property
    def bytes_sent(self) -> int:
        return sum(row.bytes_sent for row in self._rows)

    @property
    def bytes_received(self) -> int:
        return sum(row.bytes_received for row in self._rows)

    @property
    def messages(self) -> int:
        """Messages this rank sent."""
        return sum(row.messages for row in self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def __repr__(self) -> str:
        lines = [_line("op", "peer", "sent", "received", "messages", "start_s", "end_s")]
        lines += [_row_line(row) for row in self._rows[: _SHOWN // 2]]
        if len(self._rows) > _SHOWN:
            lines.append(f"... {len(self._rows) - _SHOWN} more rows ...")
        lines += [_row_line(row) for row in self._rows[max(_SHOWN // 2, len(self._rows) - _SHOWN // 2) :]]
        lines.append(_line("total", "", self.bytes_sent, self.bytes_received, self.messages, "", ""))
        return "\n".join(line.rstrip() for line in lines)


def _row_line(row: Row) -> str:
    peer = "" if row.peer is None else row.peer
    op = row.op if row.exact else row.op + "*"  # a star: by formula, not counted
    times = (f"{row.start_s:.6f}", f"{row.end_s:.6f}")
    return _line(op, peer, row.bytes_sent, row.bytes_received, row.messages, *times)


def _line(op: object, peer: object, *numbers: object) -> str:
    return f"{op!s:<16}{peer!s:>5}" + "".join(f"{number!s:>13}" for number in numbers)
