"""Exchanges around a ring, several of them under way at once.

In a ring every rank sends to its right neighbour and receives from its left one, again and again. With one
exchange at a time the wire is idle while a rank adds, and the rank is idle while bytes travel. So a long
chunk is cut into segments, and while what one segment brought is being added, the next ones are travelling.

Nothing may be sent before it has come. What a rank sends in one step of a ring is what came in the step
before, segment by segment; so with m segments in a step, up to m exchanges can be under way, and no more. What
a rank *receives* needs only a place: each receive is made known one exchange early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from course_lib.comm.communicator import Communicator
from course_lib.comm.messages import Handle
from course_lib.plan.traffic import num_segments

MOST_UNDER_WAY = 4  # measured: more gain nothing, and each needs a place of a segment to receive into


@dataclass(frozen=True)
class Hop:
    """One exchange with the neighbours: `send` goes to the right, `recv` comes from the left; then `then` is called."""

    send: torch.Tensor
    recv: torch.Tensor
    then: Callable[[], Any] | None = None


def send_around(
    comm: Communicator, hops: Sequence[Hop], window: int = 1, meanwhile: Callable[[], Any] | None = None
) -> None:
    """Do the hops in order, `window` of them under way at once, and `meanwhile` while the first one is.

    Each may send what came `window` hops before, and must not receive where one of the `window` before it does.
    """
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    under_way: deque[tuple[Handle, Hop]] = deque()
    for hop in hops[: window + 1]:
        comm.expect(hop.recv, left)
    for i, hop in enumerate(hops):
        if i >= window:
            _finish(*under_way.popleft())
            for next_hop in hops[i + 1 : i + 2]:
                comm.expect(next_hop.recv, left)
        handle = comm.exchange(hop.send, right, hop.recv, left, async_op=True)
        assert handle is not None
        under_way.append((handle, hop))
        if i == 0 and meanwhile is not None:
            meanwhile()
    for handle, hop in under_way:
        _finish(handle, hop)


def _finish(handle: Handle, hop: Hop) -> None:
    handle.wait()
    if hop.then is not None:
        hop.then()


class Segments:
    """How all ranks cut their chunks, which the longest chunk decides; and places to receive segments into."""

    def __init__(self, comm: Communicator, longest: torch.Tensor, segment_bytes: int) -> None:
        self.num = num_segments(longest.numel(), longest.element_size(), segment_bytes)
        self.window = min(self.num, MOST_UNDER_WAY)
        self._length = -(-longest.numel() // self.num)
        self._slots = comm.scratch((self.window + 1) * self._length, longest.dtype)
        self._taken = 0

    def of(self, *chunks: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The first segment of each chunk, then the second of each, and so on; a shorter chunk's last may be empty."""
        for i in range(self.num):
            yield tuple(chunk[i * self._length : (i + 1) * self._length] for chunk in chunks)

    def slot(self, like: torch.Tensor) -> torch.Tensor:
        """A place for a segment as long as `like`; it comes round again after `window` others."""
        start = self._taken % (self.window + 1) * self._length
        self._taken += 1
        return self._slots[start : start + like.numel()]
