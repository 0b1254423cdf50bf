"""A job that does nothing any more: how that is noticed, and where its workers stand.

A worker that computes uses the processor, and one that waits for another uses next to nothing of it (up to 2 % where
torch's store is asked again and again). So a job hangs when for `timeout` seconds no worker has used more than 4 %,
none has written a line, no agent has done anything, and on virtual hosts next to nothing has crossed a cable. (NCCL's
kernels wait while using a processor; there torch's own watchdog, or the deadline, ends the job.)
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import time

import psutil

from course_lib.runtime.errors import Frame, RanksHung, grouped, ranks_text, users_part
from course_lib.runtime.hosts import VirtualHosts
from course_lib.runtime.torchrun.diary import Agent, Worker
from course_lib.runtime.torchrun.failure import ending
from course_lib.runtime.torchrun.relay import Relay

_BUSY = 0.04  # of one processor
_BYTES_PER_S = 20_000  # agents and stores talk, too
_EVERY_S = 1.0
_STACK_S = 2.0
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_DISTRIBUTED = re.compile(r"torch[/\\]distributed[/\\]")
_WRAPPERS = ("wrapper", "<module>", "_call_store", "_new_process_group_helper")


class Activity:
    """Since when nothing has happened. `hosts`: the virtual hosts that have cables, if any."""

    def __init__(self, hosts: VirtualHosts | None) -> None:
        self.last = self._looked = time.monotonic()
        self._hosts = hosts
        self._used: dict[int, float] = {}
        self._crossed = 0

    def touch(self) -> None:
        self.last = time.monotonic()

    def idle_s(self, workers: list[Worker]) -> float:
        """Seconds without any sign of life; `workers`: those that run."""
        now = time.monotonic()
        passed = now - self._looked
        if passed >= _EVERY_S:
            used = {worker.pid: _cpu_s(worker.pid) for worker in workers}
            crossed = sum(link.bytes_sent for link in self._hosts.counters()) if self._hosts else 0
            busy = any(seconds - self._used.get(pid, 0.0) > _BUSY * passed for pid, seconds in used.items())
            if busy or crossed - self._crossed > _BYTES_PER_S * passed:
                self.last = now
            self._looked, self._used, self._crossed = now, used, crossed
        return now - self.last


def _cpu_s(pid: int) -> float:
    """Processor time of a worker and of what it started."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            times = one.cpu_times()
            total += times.user + times.system
    except psutil.Error:
        pass
    return total


def hung(reason: str, workers: list[Worker], agents: list[Agent], relay: Relay) -> RanksHung:
    """Ask the live ones of `workers` where they stand, which ends them; the error that says it."""
    for agent in agents:
        _signal(agent.pid, signal.SIGSTOP)  # it must not start new ones
    live = [worker for worker in workers if worker.gone is None]
    for worker in live:
        relay.raw(worker)
        # Python's fault handler writes the stacks, whatever the worker is in.
        _signal(worker.pid, signal.SIGABRT)
    stacks = _stacks(live, relay)
    texts = {worker.rank: _standing(worker, stacks.get(worker.rank, [])) for worker in workers}
    lines = [reason, *_sentence(workers, stacks), ""]
    lines += [f"  {ranks_text(ranks)}: {text}" for text, ranks in grouped(texts)]
    if not workers:
        lines += [
            "  no worker has been started; agents that run: " + ", ".join(str(agent.node) for agent in agents)
        ]
    where = {rank: "\n".join(f"  {line}" for text in users_part(frames) for line in text.splitlines())
             for rank, frames in stacks.items()}  # fmt: skip
    if where:
        lines += ["", "Where they stand (most recent call last):"]
        for text, ranks in grouped(where):
            lines += [f"  {ranks_text(ranks)}:", text or "      no Python stack"]
    whole = ["".join(f"{frame}\n" for frame in stacks.get(rank, [])) for rank in sorted(texts)]
    return RanksHung("\n".join(lines), reason, [texts[rank] for rank in sorted(texts)], whole)


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def _stacks(workers: list[Worker], relay: Relay) -> dict[int, list[Frame]]:
    """By rank: the frames of the main thread, outermost first."""
    texts: dict[int, list[str]] = {worker.rank: [] for worker in workers}
    end = time.monotonic() + _STACK_S
    while time.monotonic() < end:
        time.sleep(0.05)
        for worker in workers:
            texts[worker.rank] += relay.raw(worker)
        if all(any(_FRAME.match(line) for line in lines) for lines in texts.values()):
            break
    time.sleep(0.05)
    for worker in workers:
        texts[worker.rank] += relay.raw(worker)
    return {rank: _main_thread(lines, relay) for rank, lines in texts.items()}


def _main_thread(lines: list[str], relay: Relay) -> list[Frame]:
    threads: list[list[Frame]] = [[]]
    for line in lines:
        if line.startswith(("Current thread", "Thread ")):
            threads.append([])
        elif match := _FRAME.match(line):
            file, number = match[1], int(match[2])
            text = linecache.getline(file, number).strip()
            threads[-1].insert(0, Frame(relay.name(file), number, match[3], text))
    return next(
        (thread for thread in reversed(threads) if thread and thread[0].function == "<module>"), threads[-1]
    )


def _standing(worker: Worker, frames: list[Frame]) -> str:
    if worker.gone is not None:
        return ending(worker.exit_code) if worker.exit_code is not None else "has ended"
    last = worker.output.rstrip("\n").rpartition("\n")[2]
    wrote = f"; its last line: {last!r}" if last else ""
    call = _call(frames)
    return (f"waiting in {call}" if call else "running, in no call of torch.distributed") + wrote


def _call(frames: list[Frame]) -> str:
    """The torch.distributed function that the worker's own code called, if it is in one."""
    for frame in frames:
        if _DISTRIBUTED.search(frame.file) and frame.function not in _WRAPPERS:
            return frame.function
    return ""


def _sentence(workers: list[Worker], stacks: dict[int, list[Frame]]) -> list[str]:
    """What does not match, if that can be seen."""
    calls: dict[str, list[int]] = {}
    for worker in workers:
        calls.setdefault(_call(stacks.get(worker.rank, [])) if worker.gone is None else "", []).append(
            worker.rank
        )
    inside = {call: ranks for call, ranks in calls.items() if call}
    if not inside:
        return []
    hint = " (it returns when all have called it, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE)"
    parts = [
        f"{ranks_text(ranks)} in {call}{hint if call == 'init_process_group' else ''}"
        for call, ranks in inside.items()
    ]
    parts += [f"{ranks_text(calls[''])} in none"] if "" in calls else []
    return [f"Waiting: {', '.join(parts)}."]
