"""Collectives that go on while the caller computes: one thread for each group, and a handle for each collective.

Ranks must do the collectives of a group in the same order, or they would send each other bytes that mean something
else. A queue with one thread behind it keeps the order in which they were asked for. Groups do not wait for each other:
each has its own thread, so two groups that share ranks cannot deadlock.

The thread is Python, and so is the caller; one of them runs at a time. That costs little here, because torch leaves the
interpreter's lock wherever time is spent: in waiting for messages, in adding, in backward.
"""

from __future__ import annotations

import datetime
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.ring_backend import context

_NO_TIMEOUT = datetime.timedelta(0)  # torch's value for "wait as long as the group does"
_STOP_S = 1.0  # the longest that the end of a group waits for a collective that is under way


class RingWork(dist.Work):
    """One collective: what torch calls a Work. Made by the caller, done by the group's thread.

    `do` is the collective; `outputs` are the tensors that hold its result, which the future's value is.
    """

    def __init__(self, name: str, do: Callable[[], Any], outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.line: _Line | None = None  # where it waits for its turn
        self._name, self._do, self._outputs = name, do, outputs
        # A thread's own: the caller's counts. And such a mode's tensors cannot be written outside it.
        self._inference = torch.is_inference_mode_enabled() or any(t.is_inference() for t in outputs)
        self._ended = threading.Event()
        self._future: Any = torch.futures.Future()

    def run(self, earlier: BaseException | None) -> None:
        """In the group's thread. `earlier`: what went wrong in a collective before this one, if anything."""
        try:
            if earlier is not None:
                raise RuntimeError(
                    f"{self._name}: an earlier collective of this group failed ({type(earlier).__name__}: {earlier}), "
                    "so its ranks no longer agree; make a new group, or end the job"
                ) from earlier
            with torch.inference_mode() if self._inference else torch.no_grad():
                self._do()
        except BaseException as error:
            self.error = error
        del self._do  # and with it the group and the inputs
        self._ended.set()
        self._future.set_result((self.error, self._outputs))

    # --- what torch asks of a Work

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Return when the collective is done; raise what went wrong in it."""
        seconds = timeout.total_seconds() or None
        if self.line is not None:
            self.line.bring_forward(self)
        if not self._ended.is_set():
            with context.board().wait(self._name):
                self._ended.wait(seconds)
        if not self._ended.is_set():
            raise RuntimeError(f"{self._name}: wait timeout after {seconds} s; the collective goes on")
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Any:
        """The end as a torch future, whose value is the list of outputs."""
        return self._future.then(_outputs_or_error)

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self.error is None

    def exception(self) -> BaseException | None:  # type: ignore[override]
        return self.error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()


def _outputs_or_error(future: Any) -> list[torch.Tensor]:
    """An error raised here fails the future for C++ too, where DDP waits; `set_exception` does for Python only."""
    error, outputs = future.value()
    if error is not None:
        raise error
    return outputs


class Worker:
    """The thread of a group. It ends with `stop`, or when the group is forgotten, or with the process."""

    def __init__(self, name: str) -> None:
        self._line = _Line()
        self._thread = threading.Thread(target=self._line.serve, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._line.queue.put, None)

    def hand(self, work: RingWork, now: bool = False) -> RingWork:
        """Do `work` after all that was handed before it. `now`: the caller will wait, and may as well do it itself."""
        self._line.hand(work, now)
        return work

    def stop(self) -> None:
        self._end()
        self._thread.join(_STOP_S)


class _Line:
    """The works that wait for their turn. The thread holds on to this alone, so that a Worker can be forgotten."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[RingWork | None] = SimpleQueue()
        self._counting, self._turn = threading.Lock(), threading.Lock()
        self._num_left = 0  # handed and not done
        self._failed: BaseException | None = None
        self._doing: int | None = None  # the thread that does a work now

    def hand(self, work: RingWork, now: bool) -> None:
        work.line = self
        with self._counting:
            now = now and self._num_left == 0
            self._num_left += 1
            if now:
                self._turn.acquire()
        if now:
            self._do(work)  # two threads need not wake up for it
        elif self._is_mine():  # asked for by a callback of the work that just ended
            self._run(work)
        else:
            self.queue.put(work)

    def bring_forward(self, work: RingWork) -> None:
        """Called by whoever waits for `work`. A callback waits in the only thread that could do it: it does it here,
        after all that come before.
        """
        while self._is_mine() and not work.is_completed():
            if (earlier := self.queue.get()) is None:
                self.queue.put(None)
                raise RuntimeError("the group was destroyed before this collective was done")
            self._run(earlier)

    def serve(self) -> None:
        while (work := self.queue.get()) is not None:
            self._turn.acquire()
            self._do(work)
            del work  # or its outputs would live until the next one comes

    def _is_mine(self) -> bool:
        return self._doing == threading.get_ident()

    def _do(self, work: RingWork) -> None:
        self._doing = threading.get_ident()
        self._run(work)
        self._doing = None
        self._turn.release()

    def _run(self, work: RingWork) -> None:
        work.run(self._failed)
        self._failed = self._failed or work.error
        with self._counting:
            self._num_left -= 1
