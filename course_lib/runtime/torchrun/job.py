"""A running torchrun job: watch it, kill parts of it, add nodes, wait for its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import TracebackType

from course_lib.runtime.torchrun.checks import check_type
from course_lib.runtime.torchrun.diary import Agent, Event, Worker
from course_lib.runtime.torchrun.engine import Engine
from course_lib.runtime.torchrun.failure import TorchrunError
from course_lib.runtime.torchrun.result import TorchrunResult
from course_lib.runtime.torchrun.settings import Settings

_TICK_S = 0.02
_AT_ONCE_S = 2.0


class TorchrunJob:
    """Made by `start_torchrun`. A context manager: whatever is left of the job is killed at the end of the block.

    The workers' lines are shown, and limits are watched, while one of its methods runs: `wait`, `watch`, `until`.
    `began`: seconds since 1970, the zero of the events' times. `command`: what one would type, a line for each node.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._engine = Engine(settings)
        self.began = self._engine.began
        if self._engine.label:
            self._engine.relay.say(self._engine.label)
        try:
            if settings.rdzv_store == "apart":
                self._engine.start_store()
            for _ in range(settings.num_agents):
                self._engine.start_agent()
        except BaseException:
            self.close()
            raise

    # --- what is there

    @property
    def events(self) -> list[Event]:
        """All that happened so far; print them one by one."""
        self._engine.pump()
        return self._engine.diary.events

    @property
    def output(self) -> dict[int, str]:
        """By rank: what all processes of that rank wrote so far."""
        self._engine.pump()
        return self._engine.diary.output()

    @property
    def command(self) -> str:
        return self._engine.command_text()

    def workers(self) -> list[Worker]:
        """The workers that run now, by rank."""
        self._engine.pump()
        return self._engine.diary.alive()

    def agents(self) -> list[Agent]:
        """The agents that run now, by node."""
        self._engine.pump()
        return [agent for agent in self._engine.agents() if agent.status is None]

    # --- what can be done to it

    def kill_worker(self, rank: int, signum: int = signal.SIGKILL) -> Worker:
        """Send a signal to the worker that has `rank` now; returns that worker."""
        _check_signal(signum)
        worker = next((worker for worker in self.workers() if worker.rank == rank), None)
        if worker is None:
            there = ", ".join(str(worker.rank) for worker in self._engine.diary.alive()) or "none"
            raise ValueError(f"rank: no worker with rank {rank} runs now; there are: {there}")
        when = time.time()  # before it: what follows from the signal must not seem to have been there first
        os.kill(worker.pid, signum)
        self._engine.note("killed", worker.node, when, rank=rank, pid=worker.pid, restart=worker.restart_count,
                   detail=signal.Signals(signum).name)  # fmt: skip
        if signum == signal.SIGKILL:
            self._pump_until(lambda: worker.gone is not None)
        return worker

    def kill_agent(self, node: int, signum: int = signal.SIGKILL) -> Agent:
        """SIGKILL: as if the node were switched off: its agent, workers, and all they started. Others: the agent only.

        (Switched off for real, a machine also stops answering; here the connections are closed, which others notice
        at once.)
        """
        _check_signal(signum)
        agent = next((agent for agent in self.agents() if agent.node == node), None)
        if agent is None:
            there = ", ".join(str(agent.node) for agent in self.agents()) or "none"
            raise ValueError(f"node: no agent {node} runs now; there are: {there}")
        agent.killed, when = True, time.time()
        if signum == signal.SIGKILL:
            self._engine.guardian.kill(node)
        else:
            os.kill(agent.pid, signum)
        detail = f"the node, by {signal.Signals(signum).name}"
        self._engine.note("killed", node, when, pid=agent.pid, detail=detail)
        if signum == signal.SIGKILL:
            self._pump_until(lambda: agent.status is not None)
        return agent

    def _pump_until(self, condition: Callable[[], bool]) -> None:
        """For what happens at once: so that the next line of the cell finds it done."""
        end = time.monotonic() + _AT_ONCE_S
        while not condition() and time.monotonic() < end:
            self._engine.pump()
            time.sleep(_TICK_S / 4)

    def terminate(self) -> None:
        """SIGTERM to every agent, as a scheduler does when the time is up; each hands it on to its workers.

        Workers that SIGTERM ends, by itself or with exit code 143, are no failure; `wait` raises what else they say.
        """
        self._engine.terminate()

    def add_node(self) -> int:
        """Start one more agent, on the first host that has none; returns the number of the node.

        Raises ValueError if the job has no room for it (`nnodes`) or has ended.
        """
        engine, (least, most) = self._engine, self.settings.nodes
        if self.poll() is not None:
            raise ValueError("add_node: the job has ended; start another one")
        # A node with a fixed rank cannot be replaced by one with another rank.
        taken = len(engine.commands) if engine.meeting.backend == "static" else len(self.agents())
        if taken >= most or self.settings.node_rank is not None:
            raise ValueError(
                f"add_node: nnodes={self.settings.nnodes or most} has no room for another node; "
                f"use nnodes='{least}:{taken + 1}'"
            )
        return self._engine.start_agent()

    # --- waiting for it

    def poll(self) -> TorchrunResult | None:
        """The result if the job has ended (failed or not: see its `error`), else None."""
        if self._engine.result is None:
            self._engine.look()
        return self._engine.result

    def watch(self, seconds: float) -> None:
        """Show what the job does for so long, or until it ends."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def until(self, condition: Callable[[], object], timeout: float | None = None) -> bool:
        """Show what the job does until `condition()` is true; False if the job has ended before.

        Raises TimeoutError after `timeout` seconds (0: it looks once). The job runs on. An interrupt ends the job.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout: expected a number of seconds, 0 or more, or None, got {timeout!r}")
        end = float("inf") if timeout is None else time.monotonic() + timeout
        try:
            while not condition():
                if self.poll() is not None:
                    return bool(condition())
                if time.monotonic() >= end:
                    raise TimeoutError(
                        f"what you wait for did not happen within {timeout} s; the job runs on"
                    )
                time.sleep(_TICK_S)
        except KeyboardInterrupt:
            self.close()
            raise
        return True

    def wait(self, timeout: float | None = None, check: bool = True) -> TorchrunResult:
        """Wait for the end, and return the result; `check`: raise what went wrong. TimeoutError after `timeout` s."""
        check_type("check", check, bool, "True or False")
        self.until(lambda: False, timeout)
        result = self._engine.result
        assert result is not None
        if check and result.error is not None:
            raise result.error.with_traceback(None)
        return result

    def close(self) -> None:
        """Kill what is left of the job, and remove its temporary files unless it failed. Harmless when it has ended."""
        if self._engine.result is None:
            error = TorchrunError("the job was closed before its end") if self._engine.diary.agents else None
            self._engine.finish(error, keep=False)

    def __enter__(self) -> TorchrunJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "ended" if self._engine.result else f"{len(self._engine.diary.alive())} workers"
        return f"TorchrunJob({self.settings.named(self.settings.script)}, {state})"


def _check_signal(signum: int) -> None:
    if not isinstance(signum, int) or signum not in set(signal.Signals):
        raise ValueError(f"signum: expected a signal such as signal.SIGTERM, got {signum!r}")
