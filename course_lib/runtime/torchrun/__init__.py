"""The real `torchrun`, from a cell: its agents and workers always cleaned up, its failures as exceptions.

`torchrun` = `python -m torch.distributed.run`. On every node it starts an *agent*; the agents meet at a rendezvous,
agree on who has which rank, and each starts its workers: your script, once for each rank, with RANK, WORLD_SIZE and the
rest in the environment. When a worker fails, the agents restart all of them, up to `max_restarts` times.

A guard process (`guard`) stands over each job, because workers live in sessions of their own and would outlive
everything else. What the workers write is read from the log files that torchrun keeps for them (`--redirects`,
`--log-dir`), and what torchrun does from the events it reports (`--event-log-handler`).
"""

from course_lib.runtime.torchrun.diary import Agent, Event, Worker
from course_lib.runtime.torchrun.failure import TorchrunError
from course_lib.runtime.torchrun.job import TorchrunJob
from course_lib.runtime.torchrun.result import TorchrunResult
from course_lib.runtime.torchrun.start import start_torchrun, torchrun

__all__ = [
    "Agent",
    "Event",
    "TorchrunError",
    "TorchrunJob",
    "TorchrunResult",
    "Worker",
    "start_torchrun",
    "torchrun",
]
