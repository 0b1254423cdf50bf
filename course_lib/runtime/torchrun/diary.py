"""What happened in a job, from the guard's diary: agents, workers, and a list of events with their times.

torchrun tells of its workers by itself: `--event-log-handler=console` has it write a line of JSON whenever a worker
starts and, at the end, how each one ended. The rest is read from the warnings it writes anyway.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from dataclasses import dataclass, field
from typing import Any

from course_lib.runtime.torchrun.kept import Kept

_EVENT = '{"name": "torchelastic.'
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
_ENDED_BY_AGENT = re.compile(r"Sending process (\d+) closing signal (\w+)")
_GLOG = re.compile(r"^[IWE]\d{4} [\d:.]+ \d+ \S+\] ")
_NOISE = re.compile(
    r"socket\.cpp:\d+\] \[c10d\]|^\*+$|OMP_NUM_THREADS|NOTE: Redirects are currently not supported"
    r"|master_addr is only used for static|node_rank is only used for static"
)


@dataclass(frozen=True)
class Event:
    """Something that happened: `at` seconds after the job began, on `node` (the number of its agent).

    `kind`: "agent started", "rendezvous" (detail: how long it took), "worker started", "worker failed" (detail: its
    exit code), "worker gone", "killed" (by you: detail says what; `at` is from before the signal), "agent ended"
    (detail: its exit code); with a store that lives apart, as node -1, "store started" and "store ended".
    """

    at: float
    kind: str
    node: int
    rank: int | None = None
    pid: int | None = None
    restart: int = 0
    detail: str = ""

    def __str__(self) -> str:
        who = f"node {self.node}" if self.rank is None else f"node {self.node}, rank {self.rank}"
        return f"{self.at:8.2f} s  {who:<16}  {self.kind}{': ' + self.detail if self.detail else ''}"


@dataclass
class Worker:
    """One process of one rank. After a restart another process has the rank, and perhaps the rank another node.

    Times are seconds after the job began. `exit_code` is as in `subprocess` (minus the signal), or None if it runs or
    nobody knows: torchrun does not tell the codes of workers that it ended for a restart.
    """

    node: int
    rank: int
    local_rank: int
    pid: int
    restart_count: int
    world_size: int
    group_rank: int
    started: float
    gone: float | None = None
    exit_code: int | None = None
    ended_by_agent: bool = False  # because another one failed, or a node came or went
    raw_error: str = ""  # what torch's @record wrote
    lines: Kept = field(default_factory=Kept, repr=False)

    @property
    def output(self) -> str:
        return "".join(line + "\n" for _, line in self.lines)


@dataclass
class Agent:
    """One `torchrun` process; `node` numbers them in the order of their start, `host` says where it runs.

    `status`: as os.waitpid reports it, None while it runs.
    """

    node: int
    pid: int
    started: float
    host: int = 0
    status: int | None = None
    gone: float | None = None
    killed: bool = False  # by us, on purpose
    reported_failure: bool = False
    restarts: int = 0
    lines: list[str] = field(default_factory=list, repr=False)

    @property
    def output(self) -> str:
        """All it wrote itself, without the events."""
        return "".join(line + "\n" for line in self.lines)


class Diary:
    """Agents and workers in the order in which they appeared, events in order of time. `began`: seconds since 1970."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.agents: dict[int, Agent] = {}
        self.workers: list[Worker] = []
        self.events: list[Event] = []

    def alive(self) -> list[Worker]:
        return sorted((w for w in self.workers if w.gone is None), key=lambda worker: worker.rank)

    def output(self) -> dict[int, str]:
        """By rank: what all processes of that rank wrote, one after another."""
        ranks = sorted({worker.rank for worker in self.workers})
        return {rank: "".join(w.output for w in self.workers if w.rank == rank) for rank in ranks}

    def add(self, note: dict[str, Any]) -> list[str]:
        """Take in one note of the guard; returns the lines that a reader should see."""
        node, at = note["agent"], note["at"] - self.began
        if note["kind"] == "agent":
            self.agents[node] = Agent(node, note["pid"], at)
            self.event(at, f"{_who(node)} started", node, pid=note["pid"])
            return []
        agent = self.agents[node]
        if note["kind"] == "gone":
            self._gone(at, node, note["pid"])
        elif note["kind"] == "ended":
            agent.status, agent.gone = note["status"], at
            self.event(at, f"{_who(node)} ended", node, pid=agent.pid, detail=_ending(note["status"]))
        elif note["text"].startswith(_EVENT):
            self._tell(at, agent, json.loads(note["text"]))
        elif not _NOISE.search(note["text"]):
            return self._line(at, agent, note["text"])
        return []

    def event(self, at: float, kind: str, node: int, **more: Any) -> None:
        bisect.insort(self.events, Event(at, kind, node, **more), key=lambda event: event.at)

    def _worker(self, node: int, pid: int) -> Worker | None:
        """The latest worker with this pid: pids come back."""
        return next((w for w in reversed(self.workers) if (w.node, w.pid) == (node, pid)), None)

    def _gone(self, at: float, node: int, pid: int) -> None:
        worker = self._worker(node, pid)
        if worker is not None and worker.gone is None:
            worker.gone = at
            self.event(at, "worker gone", node, rank=worker.rank, pid=pid, restart=worker.restart_count)

    def _tell(self, at: float, agent: Agent, told: dict[str, Any]) -> None:
        about = told["metadata"]
        more, state = json.loads(about["metadata"]), about["state"]
        agent.restarts = max(agent.restarts, about["agent_restarts"])
        if state == "RENDEZVOUS":
            took = f"took {(about['duration_ms'] or 0) / 1000:.2f} s"
            self.event(at, "rendezvous", agent.node, restart=about["agent_restarts"], detail=took)
        elif told["source"] != "WORKER":
            return
        elif state == "START":
            (local_rank,), (world_size,) = more["local_rank"], more["role_world_size"]
            rank, pid, restart = about["global_rank"], int(about["worker_id"]), about["agent_restarts"]
            self.workers.append(
                Worker(agent.node, rank, local_rank, pid, restart, world_size, about["group_rank"], at)
            )
            self.event(at, "worker started", agent.node, rank=rank, pid=pid, restart=restart)
        elif worker := self._worker(agent.node, int(about["worker_id"])):
            worker.exit_code = 0 if state == "SUCCEEDED" else more["exit_code"][0]
            worker.raw_error = about["raw_error"] or ""
            agent.reported_failure |= state == "FAILED"

    def _line(self, at: float, agent: Agent, text: str) -> list[str]:
        agent.lines.append(text)
        if failed := _FAILED.search(text):
            if worker := self._worker(agent.node, int(failed[2])):
                worker.exit_code = int(failed[1])
                self.event(at, "worker failed", agent.node, rank=worker.rank, pid=worker.pid,
                           restart=worker.restart_count, detail=f"exit code {failed[1]}")  # fmt: skip
        elif (ended := _ENDED_BY_AGENT.search(text)) and (worker := self._worker(agent.node, int(ended[1]))):
            worker.ended_by_agent = True
        # Its own traceback and report go into the error.
        return [_GLOG.sub("", text)] if _GLOG.match(text) else []


def _who(node: int) -> str:
    return "agent" if node >= 0 else "store"


def _ending(status: int) -> str:
    return f"exit code {os.waitstatus_to_exitcode(status)}"
