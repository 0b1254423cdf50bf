"""`launch`: run a function on several ranks, as a cell would call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from course_lib.runtime.errors import LaunchError
from course_lib.runtime.hosts import VirtualHosts
from course_lib.runtime.options import check_call
from course_lib.runtime.pickling import CannotSend
from course_lib.runtime.pool import Pool, RankResults


def launch(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int,
    backend: str = "auto",
    timeout: float = 60.0,
    deadline: float | None = None,
    hosts: VirtualHosts | None = None,
    memory_limit: str | int | None = None,
    show: str = "live",
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    start: str = "auto",
) -> RankResults:
    """Call `fn(comm, *args)` in `world_size` new processes, and return what they return, in rank order.

    `comm` is the rank's Communicator; torch.distributed's default group is initialised too. `fn` may be defined in a
    cell. Tensors that are returned arrive on the CPU.

    * `backend`: "gloo" (CPU), "nccl" (a GPU for each rank), "ring" (the course's own, on the CPU), or "auto": nccl if
      there are GPUs enough, else gloo.
    * `timeout`: seconds that a rank may wait in one communication; computing is never a hang.
    * `deadline`: seconds for the whole run, or None.
    * `hosts`: a VirtualHosts on which the ranks are placed, `ranks_per_host` on each in order.
    * `memory_limit`: "300MB": a rank that allocates more than that, beyond what starting took, runs out of memory.
    * `show`: "live" prints the ranks' lines as they come, "grouped" rank by rank at the end, "none" not at all.
    * `threads`: torch threads of each rank. `env`: more environment variables for the ranks.
    * `start`: "forkserver", "spawn" (a fresh interpreter for each rank; slow), "auto": the best for this system.

    Raises RankError if a rank raises or dies, RanksHung if ranks wait for each other longer than `timeout` (or the run
    takes longer than `deadline`), CannotSend (a TypeError) if `fn` or an argument cannot be sent, TypeError and
    ValueError for wrong arguments. Whatever happens, no process of it is left.
    """
    check_call(fn, args)
    try:
        with Pool(
            world_size,
            backend=backend,
            timeout=timeout,
            deadline=deadline,
            hosts=hosts,
            memory_limit=memory_limit,
            show=show,
            threads=threads,
            env=env,
            start=start,
        ) as pool:
            return pool.run(fn, *args)
    except (LaunchError, CannotSend) as error:
        raise error.with_traceback(None) from None  # the reader's line, not the launcher's insides
