"""A stream of exchanges around a ring, several of them under way at once.

In a ring every rank sends to its right neighbour and receives from its left one, again and again. With one
exchange at a time the wire is idle while a rank adds, and the rank is idle while bytes travel. So a long
chunk is cut into segments, and while what one segment brought is being added, the next ones are travelling.

Nothing may be sent before it has come. What a rank sends in one step of a ring is what came in the step
before, segment by segment; so with m segments in a step, up to m exchanges can be under way, and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from course_lib.comm.communicator import Communicator
from course_lib.comm.messages import Handle
from course_lib.plan.traffic import num_segments

MOST_UNDER_WAY = 4  # measured: more gain nothing, and each needs a place to receive into


class RingStream:
    """The exchanges of one round, in order; leaving the `with` waits for the last of them.

    `longest`: the longest of the chunks, which decides for all ranks how many segments there are in a step.
    """

    def __init__(self, comm: Communicator, longest: torch.Tensor, segment_bytes: int) -> None:
        self._comm = comm
        self._right, self._left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        self._num_segments = num_segments(longest.numel(), longest.element_size(), segment_bytes)
        self._segment_length = -(-longest.numel() // self._num_segments)
        self._window = min(self._num_segments, MOST_UNDER_WAY)
        self._under_way: deque[tuple[Handle, Callable[[], None] | None]] = deque()
        self._count = 0

    def segments(self, *chunks: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The first segment of each chunk, then the second of each, ...

        A shorter chunk may end with an empty one.
        """
        for i in range(self._num_segments):
            start, stop = i * self._segment_length, (i + 1) * self._segment_length
            yield tuple(chunk[start:stop] for chunk in chunks)

    def exchange(
        self, send: torch.Tensor, recv: torch.Tensor, then: Callable[[], None] | None = None
    ) -> None:
        """Send to the right, receive from the left, and call `then` when the bytes are there."""
        if len(self._under_way) == self._window:
            self._finish_oldest()
        handle = self._comm.exchange(send, self._right, recv, self._left, async_op=True)
        assert handle is not None
        self._under_way.append((handle, then))
        self._count += 1

    def slot(self, like: torch.Tensor) -> torch.Tensor:
        """Where the next exchange may receive a segment as long as `like`; free again after its `then`."""
        slots = self._comm.scratch(self._window * self._segment_length, like.dtype)
        start = self._count % self._window * self._segment_length
        return slots[start : start + like.numel()]

    def _finish_oldest(self) -> None:
        handle, then = self._under_way.popleft()
        handle.wait()
        if then is not None:
            then()

    def __enter__(self) -> RingStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        while kind is None and self._under_way:
            self._finish_oldest()
