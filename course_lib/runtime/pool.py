"""A pool: ranks that stay alive between cells."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from course_lib.comm.ledger import Ledger
from course_lib.comm.trace import Trace
from course_lib.runtime.errors import RankError
from course_lib.runtime.hosts import VirtualHosts
from course_lib.runtime.options import Options, check_call
from course_lib.runtime.pickling import pack_task
from course_lib.runtime.team import Team


class RankResults(list):
    """What the ranks returned, in rank order. Beside it, by rank: `output` (text), `ledger` (Ledger); `trace`: the
    events of all ranks; `seconds`: from the moment the function was handed to the ranks until the last one returned.
    """

    output: list[str]
    ledger: list[Ledger]
    trace: Trace
    seconds: float


class Pool:
    """`world_size` ranks that are started once and run one function after another.

    The options are those of `launch`; `deadline` holds for each run. Use it as a context manager, or call `close()`.
    A failure in a run ends the pool, since the ranks that are left cannot be trusted to agree; make a new one.

        with Pool(4) as pool:
            pool.run(fn, 1)
            pool.run(fn, 2)
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "auto",
        timeout: float = 60.0,
        deadline: float | None = None,
        hosts: VirtualHosts | None = None,
        memory_limit: str | int | None = None,
        show: str = "live",
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        start: str = "auto",
    ) -> None:
        options = Options(
            world_size, backend, timeout, deadline, show, threads, env, start, hosts, memory_limit
        )
        self.world_size = world_size
        self._ended = ""
        self._running = threading.Lock()
        self._team = Team(options)
        _say_backend(self._team)

    def run(self, fn: Callable[..., Any], *args: Any) -> RankResults:
        """Call `fn(comm, *args)` on every rank. Errors: see `launch`; on a pool that has ended: RuntimeError."""
        check_call(fn, args)
        if not self._team.open:
            raise RuntimeError(
                f"this pool has ended ({self._ended or 'closed'}); make a new one: Pool({self.world_size})"
            )
        payload, sources = pack_task(fn, args)
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "this pool is running a function in another thread; wait for it, or make a second pool"
            )
        try:
            done = self._team.run(payload, sources)
            return self._results(done)
        except BaseException as error:
            self._ended = f"a run ended with {type(error).__name__}"
            raise
        finally:
            self._running.release()

    def _results(self, done: list[Any]) -> RankResults:
        results = RankResults()
        for rank, (_, _, _, payload) in enumerate(done):
            try:
                results.append(pickle.loads(payload))
            except Exception as error:
                raise RankError(
                    f"what rank {rank} returned cannot be read here: {type(error).__name__}: {error}. Return numbers, "
                    "strings, tensors or containers of them.",
                    rank,
                    type(error).__name__,
                    str(error),
                ) from None
        results.output = [self._team.output.text(rank) for rank in range(self.world_size)]
        results.ledger = [ledger for _, ledger, _, _ in done]
        results.trace = Trace.combine([trace for _, _, trace, _ in done], results.ledger)
        results.seconds = max(ended for ended, _, _, _ in done) - self._team.began
        return results

    def close(self) -> None:
        """End the ranks. Harmless when they have ended already."""
        self._team.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close() if kind is None else self._team.abort()

    def __del__(self) -> None:
        if hasattr(self, "_team"):
            self._team.abort()

    def __repr__(self) -> str:
        return f"Pool({self.world_size} ranks, {'open' if self._team.open else 'ended'})"


_said: set[str] = set()


def _say_backend(team: Team) -> None:
    """Say once what "auto" chose."""
    backend, _, num_gpus = team.members[0].place
    if team.options.backend != "auto" or team.options.show == "none" or backend in _said:
        return
    _said.add(backend)
    found = "no GPU" if num_gpus == 0 else f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}"
    where = (
        "one GPU for each rank"
        if backend == "nccl"
        else f"on the CPU ({found} for {team.options.world_size} ranks)"
    )
    print(f"backend: {backend}, {where}", flush=True)
