"""What drives a job: starts agents, takes in what the guard and the workers say, and judges how it goes."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from course_lib.runtime.errors import LaunchError, RankError, ranks_text
from course_lib.runtime.team import uninterrupted
from course_lib.runtime.torchrun import failure
from course_lib.runtime.torchrun.commands import HOLD_STORE, Command, Meeting, command, environment
from course_lib.runtime.torchrun.diary import Agent, Diary, Worker
from course_lib.runtime.torchrun.guardian import Guardian
from course_lib.runtime.torchrun.hang import Activity, hung
from course_lib.runtime.torchrun.relay import Relay
from course_lib.runtime.torchrun.rendezvous_failure import agent_error
from course_lib.runtime.torchrun.result import TorchrunResult
from course_lib.runtime.torchrun.settings import Settings

_GRACE_S = 5.0  # after the job failed on one node: the others may have something to say
_STORE = -1  # the number of the process that holds the store when it lives apart from the agents


class Engine:
    """One job. `look` does one turn; when the job has ended, `result` is set."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.meeting = settings, Meeting.of(settings)
        self.began = time.time()
        self.commands: dict[int, Command] = {}
        self.hosts: dict[int, int] = {}  # by agent
        self.guardian = Guardian()
        home = self.guardian.home
        self.log_dir = Path(settings.log_dir).absolute() if settings.log_dir else home / "logs"
        self.diary, self.relay = Diary(self.began), Relay(settings.show, settings.named)
        self.activity = Activity(settings.hosts if settings.on_namespaces else None)
        self._terminated: dict[int, int] | None = None  # see `terminate`
        self.failed_at: float | None = None
        self.result: TorchrunResult | None = None
        paced = settings.hosts is not None and not settings.on_namespaces
        self.label = "all nodes on this machine's loopback, links not limited" if paced else ""

    # --- starting

    def start_agent(self) -> int:
        agent, logs = len(self.commands), self.log_dir / f"node{len(self.commands)}"
        host = self.hosts[agent] = self._free_host()
        self.commands[agent] = command(self.settings, self.meeting, agent, host, logs)
        self._start(agent, host, self.commands[agent].argv, str(logs))
        return agent

    def _free_host(self) -> int:
        """The first host without a running agent; if there is none, the one with the fewest."""
        running = [self.hosts[agent] for agent in self.commands if self._runs(agent)]
        count = self.settings.hosts.num_hosts if self.settings.hosts else len(running) + 1
        return min(range(count), key=running.count)

    def _runs(self, agent: int) -> bool:
        return agent not in self.diary.agents or self.diary.agents[agent].status is None

    def start_store(self) -> None:
        """A process of its own for the rendezvous' store, so that every agent may die."""
        self._start(
            _STORE, 0, [sys.executable, "-c", HOLD_STORE, self.meeting.address, str(self.meeting.port)], ""
        )

    def _start(self, number: int, host: int, argv: list[str], logs: str) -> None:
        hosts, namespaces = self.settings.hosts, []
        if hosts is not None and self.settings.on_namespaces:
            namespaces = hosts.namespaces_of(host * hosts.ranks_per_host)
        env = environment(self.settings, self.guardian.home / f"agent{number}.json")
        self.guardian.start(number, argv, env, logs, namespaces)
        self.activity.touch()

    # --- watching

    def agents(self) -> list[Agent]:
        return [agent for node, agent in sorted(self.diary.agents.items()) if node >= 0]

    def note(self, kind: str, node: int, when: float, **more: Any) -> None:
        """You did something at `when` (a time.time())."""
        self.diary.event(when - self.began, kind, node, **more)
        who = f"rank {more['rank']}" if more.get("rank") is not None else f"node {node}"
        self.relay.say(f"{kind}: {who}, {more.get('detail', '')}")

    def command_text(self) -> str:
        """What one would type, a line for each node."""
        return "\n".join(self.settings.named(str(one)) for one in self.commands.values())

    def pump(self) -> None:
        """Take in, and show, all that is new."""
        if self.result is not None:
            return
        known = len(self.diary.workers)
        notes = self.guardian.notes()
        for note in notes:
            self.relay.agent(note["agent"], self.diary.add(note))
            self.diary.agents[note["agent"]].host = self.hosts.get(note["agent"], 0)
        new = self.diary.workers[known:]
        for worker in new:
            self.relay.follow(worker, self.guardian.home / "workers")
        before = {worker.rank for worker in self.diary.workers[:known]}
        for node in sorted({worker.node for worker in new if worker.rank in before}):
            here = [worker for worker in new if worker.node == node]
            ranks = ranks_text(sorted({worker.rank for worker in here}))
            count = f"{ranks} of {here[-1].world_size}, restart {here[-1].restart_count}"
            self.relay.say(f"workers started on node {node}: {count}")
        if self.relay.pump() or notes:
            self.activity.touch()

    def look(self) -> None:
        """One turn: take in what is new; end the job if it has ended, failed, or hangs."""
        self.pump()
        if self.result is not None:
            return
        agents, now, settings = self.agents(), time.monotonic(), self.settings
        running = [agent for agent in agents if agent.status is None]
        if not self.guardian.alive():
            self.finish(
                failure.TorchrunError("the process that stands over this job was killed, and the job with it")
            )
        elif len(agents) == len(self.commands) and not running:
            self.finish(self._verdict())
        elif self._doomed(agents, len(running)):
            self.failed_at = self.failed_at or now
            if now - self.failed_at > _GRACE_S:
                self.finish(self._verdict())
        elif settings.deadline is not None and time.time() - self.began > settings.deadline:
            self._hung(f"The job took longer than its deadline of {settings.deadline:g} s.")
        else:
            alive = self.diary.alive()
            limit = settings.timeout if alive else max(settings.timeout, settings.rdzv_timeout + 15)
            if self.activity.idle_s(alive) > limit:
                self._hung(f"For {limit:g} s (timeout) no worker has computed or written anything.")

    def _doomed(self, agents: list[Agent], running: int) -> bool:
        """Whether the job cannot succeed any more, though some agents run."""
        failed = [agent for agent in agents if agent.status not in (None, 0)]
        if self._terminated is not None or len(agents) < len(self.commands) or not failed:
            return False
        finished = sum(agent.status == 0 for agent in agents)
        least = 1 if self.settings.node_rank is not None else self.settings.nodes[0]
        return any(agent.reported_failure for agent in failed) or running + finished < min(least, len(agents))

    def last_workers(self) -> list[Worker]:
        """The workers of the last round: of each agent that was not killed on purpose, the latest."""
        killed = {agent.node for agent in self.agents() if agent.killed}
        latest = {(w.node, w.local_rank): w for w in self.diary.workers if w.node not in killed}
        return sorted(latest.values(), key=lambda worker: worker.rank)

    # --- ending

    def terminate(self) -> None:
        """SIGTERM to every agent. What workers have written of tracebacks so far they had handled: they live."""
        self.pump()
        self._terminated = {worker.pid: failure.tracebacks_of(worker) for worker in self.diary.alive()}
        for agent in self.agents():
            if agent.status is None:
                when = time.time()
                os.kill(agent.pid, signal.SIGTERM)
                self.note("killed", agent.node, when, pid=agent.pid, detail="SIGTERM to the agent")

    def _verdict(self) -> LaunchError | None:
        agents = self.agents()
        failed = [agent for agent in agents if agent.status != 0 and not agent.killed]
        killed = any(agent.killed for agent in agents)
        succeeded = any(agent.status == 0 for agent in agents)
        if self._terminated is not None:
            return self._after_sigterm(self._terminated)
        lost = any(agent.reported_failure or agent.status is None for agent in failed)
        if succeeded and not lost and (self.settings.elastic or not (failed or killed)):
            return None
        workers = self.last_workers()
        if any(worker.exit_code not in (0, None) for worker in workers):
            return self._worker_error(workers)
        found = {agent.node: agent for agent in agents}
        return agent_error(self.settings, found, self.guardian.home, self.meeting.endpoint)

    def _after_sigterm(self, tracebacks: dict[int, int]) -> LaunchError | None:
        """What went wrong when the job was told to end, if anything did. The agents do not say it: they ended, too."""
        workers = self.last_workers()
        for worker in workers:
            failure.fill_in(worker, tracebacks.get(worker.pid, 0))
        if all(worker.exit_code in (0, None, -signal.SIGTERM, 128 + signal.SIGTERM) for worker in workers):
            return None
        error = self._worker_error(workers)
        return None if failure.is_victim(error) else error

    def _worker_error(self, workers: list[Worker], passed: str = "") -> RankError:
        return failure.worker_error(self.settings, workers, self._restarts(), str(self.log_dir), passed)

    def _hung(self, reason: str) -> None:
        workers = self.last_workers()
        gone = failure.gone_by_itself(workers)
        for worker in gone:
            failure.fill_in(worker)
        ending_others = any(worker.ended_by_agent and worker.gone is None for worker in workers)
        if gone and (ending_others or any(worker.exit_code for worker in gone)):
            # A worker failed, and its agent gives the others 30 s to end: no hang.
            self.finish(self._worker_error(workers, passed=reason))
            return
        running = [agent for agent in self.agents() if agent.status is None]
        self.finish(hung(reason, workers, running, self.relay))

    def _restarts(self) -> int:
        return max((agent.restarts for agent in self.agents()), default=0)

    def finish(self, error: LaunchError | None, keep: bool = True) -> None:
        """End everything; `keep` the log files after an error (until this process ends)."""
        with uninterrupted():
            self.guardian.stop()
            self.pump()
            if self.guardian.killed:  # its agents died with it, but not their workers
                for worker in self.diary.alive():
                    with suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
            self.relay.finish(self.diary.workers)
            seconds = max((agent.gone or 0.0 for agent in self.agents()), default=0.0)
            kept = bool(self.settings.log_dir) or (error is not None and keep)
            workers = self.diary.workers
            self.result = TorchrunResult(
                self.diary.output(),
                {worker.rank: worker.exit_code for worker in workers},
                self._restarts(),
                seconds or time.time() - self.began,
                str(self.log_dir) if kept else "",
                self.command_text(),
                [one.argv for one in self.commands.values()],
                workers,
                {agent.node: agent for agent in self.agents()},
                self.diary.events,
                self.label,
                error,
            )
            self.guardian.close()
            self.meeting.release(self.settings)
            if kept and not self.settings.log_dir:
                atexit.register(shutil.rmtree, self.guardian.home, ignore_errors=True)
            else:
                shutil.rmtree(self.guardian.home, ignore_errors=True)
