"""SIGTERM: how a scheduler, or torchrun's agent, says that this process will end soon.

The usual default, to die at once, throws the steps since the last snapshot away. Here the signal only sets a flag; the
ranks agree after the step they are in, and save. Nobody waits for ever: an agent kills its workers 30 s after SIGTERM,
and it sends SIGTERM also when *another* worker has failed, where a rank may sit in a collective that never ends.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

EXIT_CODE = 128 + signal.SIGTERM
"""143: ended by SIGTERM. Not 0, by which an agent or a scheduler would understand that the job is done."""


class StopSignal:
    """`with StopSignal(grace_s) as stop:` SIGTERM sets `stop.received`, and ends the process after `grace_s` seconds,
    unless `stop.settle()` is called before. On leaving, SIGTERM means again what it meant. Only Python's main thread
    hears signals; in another one, nothing changes."""

    def __init__(self, grace_s: float) -> None:
        self.received = False
        self._deadline = threading.Timer(grace_s, os._exit, [EXIT_CODE])
        self._deadline.daemon = True
        self._hears = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopSignal:
        if self._hears:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()
        if self._hears:
            signal.signal(signal.SIGTERM, self._before)

    def settle(self) -> None:
        """The ranks have agreed: the process ends by itself now."""
        self._deadline.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received = True
            self._deadline.start()
