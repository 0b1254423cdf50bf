"""A team: the processes of one group of ranks, seen from the kernel. One loop reads all they say and watches them.

Everything happens in the thread that launched: the ranks' output must be written by the thread that runs the cell, or
a notebook shows it in the wrong place.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from course_lib.comm.board import Board
from course_lib.runtime import report
from course_lib.runtime.errors import Failure, Frame, LaunchError
from course_lib.runtime.member import Member, start_member
from course_lib.runtime.options import Options
from course_lib.runtime.output import Output, Stream
from course_lib.runtime.processes import fork_server
from course_lib.runtime.standing import Standing

_TICK_S = 0.02  # how often waits and deaths are looked at
_SETTLE_S = 0.15  # after a failure: others that fail on their own at the same time are reported too
_CAUSE_S = 1.0  # after a failure that looks like a consequence: its cause may come later
_START_S = 60.0  # the least time the ranks get to find each other
_END_S = 2.0


@dataclass
class Team:
    """The ranks of one launch or pool. Made with `Team(options)`; `close` or a failure ends it."""

    options: Options
    members: list[Member] = field(default_factory=list)
    open: bool = True
    run_number: int = 0

    def __post_init__(self) -> None:
        self.server = fork_server(self.options.start)
        self.board = Board.create(self.options.world_size)
        self.output = Output(self.options.world_size, self.options.show)
        self.began = time.monotonic()
        try:
            for rank in range(self.options.world_size):
                self.members.append(start_member(rank, self.options, self.server, self.board))
            self._until("hello", None)
            port = self.members[0].port
            for member in self.members:
                member.tell("connect", port)
            self._until("ready", None)
        except BaseException:
            self.abort()
            raise

    # --- running

    def run(self, payload: bytes, sources: dict[str, str]) -> list[Any]:
        """Run a packed task on all ranks; the members' `done`, in rank order. A failure ends the team."""
        try:
            self.run_number += 1
            self.output = Output(self.options.world_size, self.options.show)
            self.began = time.monotonic()
            for member in self.members:
                member.state, member.done = "running", None
                member.tell("run", self.run_number, self.began, payload, sources)
            deadline = self.options.deadline
            self._until("done", None if deadline is None else self.began + deadline)
            self._drain()
            self.output.finish()
            return [member.done for member in self.members]
        except BaseException:
            self.abort()
            raise

    def _until(self, state: str, deadline: float | None) -> None:
        """Read what the ranks say until all are in `state`; raise if one fails, or waits too long."""
        with selectors.DefaultSelector() as selector:
            for member in self.members:
                selector.register(member.channel, selectors.EVENT_READ, member)
                for stream in member.streams:
                    if stream.open:
                        selector.register(stream, selectors.EVENT_READ, stream)
            looked = time.monotonic()
            while any(member.state != state for member in self.members):
                for key, _ in selector.select(_TICK_S):
                    if isinstance(key.data, Stream):
                        self.output.add(key.data, key.data.read())
                        if not key.data.open:
                            selector.unregister(key.data)
                    elif not self._listen(key.data):
                        selector.unregister(key.data.channel)
                if time.monotonic() - looked > _TICK_S / 2:
                    self._look(deadline)
                    looked = time.monotonic()

    def _listen(self, member: Member) -> bool:
        message = member.listen()
        if message is not None and message[0] == "progress":
            self.output.progress(message[1][0])
        return message is not None

    # --- watching

    def _look(self, deadline: float | None) -> None:
        now = time.monotonic()
        for member in self.members:
            if member.gone is not None and member.failure is None:
                status = self.server.status(member.number)
                if status is None and now - member.gone > 0.5:
                    self.server.kill([member.number])  # it closed its channel but lives on
                if status is not None:
                    frames = report.parse_stack(member.read_stacks())
                    member.state = "dead"
                    member.failure = Failure(member.rank, "", "", frames, status=status, at=member.gone)
        failures = [member.failure for member in self.members if member.failure is not None]
        if failures:
            sure = not all(report.is_consequence(failure) for failure in failures)
            if now - min(failure.at for failure in failures) > (_SETTLE_S if sure else _CAUSE_S):
                raise self._failed(failures)
        elif deadline is not None and now > deadline:
            raise self._hung(f"The launch took longer than its deadline of {self.options.deadline} s.", now)
        elif any(
            now - wait.since > self._patience() for m in self.members for wait in self.board.waits(m.rank)
        ):
            waited = f"Ranks have waited in a communication for longer than the timeout of {self.options.timeout} s."
            raise self._hung(waited, now)

    def _patience(self) -> float:
        return self.options.timeout if self.run_number else max(self.options.timeout, _START_S)

    def _standings(self) -> dict[int, Standing]:
        return {m.rank: Standing.of(self.board, m.rank, m.state, self.began) for m in self.members}

    def _failed(self, failures: list[Failure]) -> LaunchError:
        if all(report.is_timeout(failure) or report.is_consequence(failure) for failure in failures) and any(
            map(report.is_timeout, failures)
        ):
            waited = f"Ranks have waited in a communication for longer than the timeout of {self.options.timeout} s."
            return self._hung(waited, time.monotonic())
        self._drain()
        texts = {member.rank: self.output.text(member.rank) for member in self.members}
        return report.rank_error(failures, self._standings(), texts, self.options.world_size)

    def _hung(self, reason: str, now: float) -> LaunchError:
        for member in self.members:
            if member.failure is not None and report.is_timeout(member.failure):
                member.state = "inside torch"
        standings = self._standings()
        stacks = self._stacks()
        least = self.options.timeout / 2
        overdue = [r for r, s in standings.items() if any(now - wait.since > least for wait in s.waits)]
        overdue = overdue or [r for r, s in standings.items() if s.is_waiting]
        return report.ranks_hung(reason, standings, stacks, overdue)

    def _stacks(self) -> dict[int, list[Frame]]:
        """Ask every rank that runs for its stack."""
        asked = [m for m in self.members if m.pid and m.gone is None and m.state == "running"]
        for member in asked:
            member.stacks.seek(0)
            member.stacks.truncate()
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(member.pid, signal.SIGUSR1)
        time.sleep(0.1)  # faulthandler answers at once, whatever the rank is doing
        stacks = {m.rank: m.failure.frames if m.failure else [] for m in self.members}
        return stacks | {m.rank: report.parse_stack(m.read_stacks()) for m in asked}

    def _drain(self) -> None:
        """Read what is already in the pipes: a rank's output was written before it reported."""
        for member in self.members:
            for stream in member.streams:
                while stream.open and (lines := stream.read()) is not None:
                    self.output.add(stream, lines)
                self.output.add(stream, stream.take_rest())

    # --- ending

    def close(self) -> None:
        """End the ranks in peace."""
        for member in self.members:
            member.tell("bye")
        self._end(_END_S)

    def abort(self) -> None:
        """End the ranks now; whatever they had still to say is shown."""
        self._end(0.0)

    def _end(self, patience_s: float) -> None:
        if not self.open:
            return
        self.open = False
        with uninterrupted():
            own = [member.number for member in self.members]
            if not self.server.wait(own, patience_s):
                self.server.kill(own)
                self.server.wait(own, _END_S)
            self._drain()
            self.output.finish()
            self.server.forget(own)
            for member in self.members:
                member.close()
            self.board.close()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing inside: it has already ended the launch, and the clean-up must not be cut short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
