"""What moves between the devices of one process: how many bytes, from where to where, when.

Replica i lives on device i of the list; two replicas may share a device, and are counted as two all the same. `HOST`
stands for a device that is not in the list, such as the CPU that holds the inputs of replicas on GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from course_lib.comm.trace import Event, Trace

HOST = -1

PARAMETERS, BUFFERS, INPUTS, OUTPUTS = "parameters", "buffers", "inputs", "outputs"
OUTPUT_GRADIENTS, PARAMETER_GRADIENTS = "output gradients", "parameter gradients"
INPUT_GRADIENTS = "input gradients"


@dataclass(frozen=True, slots=True)
class Move:
    """Tensors copied from one replica's device to another's.

    `what`: "parameters", "buffers", "inputs", "outputs"; backward, "output gradients", "parameter gradients", "input
    gradients". `source`, `target`: numbers of replicas, or HOST. Times are seconds since the recording began; on a GPU
    they are the times of the host's calls.
    """

    what: str
    source: int
    target: int
    nbytes: int
    start_s: float
    end_s: float


class Flows:
    """The moves of one recording, and a trace in which each replica has the lanes "compute" and "comm".

    Prints as a table. In the trace, `Event.rank` is the replica's number; a move is an event at both of its ends.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.moves: list[Move] = []
        self.trace = Trace()
        self._t0 = time.monotonic()
        self._backward: dict[int, list[float]] = {}  # replica -> [start, end so far]

    def now(self) -> float:
        return time.monotonic() - self._t0

    def add(self, move: Move) -> None:
        self.moves.append(move)
        ends = ((move.source, "bytes_sent", move.target), (move.target, "bytes_received", move.source))
        for place, direction, peer in ends:
            if place != HOST:
                detail = {"peer": peer, direction: move.nbytes}
                self.trace.add(Event(place, move.what, move.start_s, move.end_s, "comm", detail))

    @contextmanager
    def span(self, name: str, replica: int = 0) -> Iterator[None]:
        """What happens inside becomes an event of the replica's lane "compute": the loss, say, or the update."""
        start_s = self.now()
        try:
            yield
        finally:
            self.trace.add(Event(replica, name, start_s, self.now(), "compute"))

    # A replica's backward is no call that could be put into a span: autograd runs it. It begins when the gradient of
    # its outputs arrives, and ends with the last gradient of its parameters.

    def backward_began(self, replica: int) -> None:
        now = self.now()
        self._backward.setdefault(replica, [now, now])

    def backward_goes_on(self, replica: int) -> None:
        if replica in self._backward:
            self._backward[replica][1] = self.now()

    def backward_ended(self) -> None:
        for replica, (start_s, end_s) in self._backward.items():
            self.trace.add(Event(replica, "backward", start_s, end_s, "compute"))
        self._backward.clear()

    # --- totals

    def bytes_sent(self, replica: int, what: str | None = None) -> int:
        """Bytes that left the replica's device: all, or of one kind (`Move.what`)."""
        return sum(m.nbytes for m in self.moves if m.source == replica and what in (None, m.what))

    def bytes_received(self, replica: int, what: str | None = None) -> int:
        """Bytes that came to the replica's device: all, or of one kind (`Move.what`)."""
        return sum(m.nbytes for m in self.moves if m.target == replica and what in (None, m.what))

    def __repr__(self) -> str:
        lines = [f"{'what':<20}{'from':>8}{'to':>8}{'bytes':>14}"]
        for m in self.moves:
            lines.append(f"{m.what:<20}{_name(m.source):>8}{_name(m.target):>8}{m.nbytes:>14}")
        lines.append(f"{'replica':<20}{'':>8}{'sent':>8}{'received':>14}")
        for replica in range(self.num_replicas):
            sent, received = self.bytes_sent(replica), self.bytes_received(replica)
            lines.append(f"{replica:<20}{sent:>16}{received:>14}")
        return "\n".join(lines)


def _name(place: int) -> str:
    return "host" if place == HOST else str(place)
