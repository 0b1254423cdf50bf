"""How long the messages of a step take: the same few lines for every kind of server."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from course_lib.comm.communicator import Communicator
from course_lib.parallel.parameter_server.synchronous import ParameterServer, Synchronous


class OneVector(nn.Module):
    """Nothing but a parameter of `length` float32, all zero."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(length))


def measure_steps(
    comm: Communicator,
    num_bytes: int,
    num_steps: int = 3,
    make: Callable[..., Synchronous] = ParameterServer,
) -> list[float]:
    """Seconds of each of `num_steps` steps (push and pull, no computing) with parameters of `num_bytes`.

    `make`: ParameterServer or ShardedParameterServer. A step begins at a barrier and ends when the slowest
    rank has its parameters; every rank returns the same list. On links of `rate` bytes per second one server
    needs about 2(N-1)·S/rate, the sharded one 2(N-1)/N·S/rate.

        with VirtualHosts(4, link="400Mbit") as hosts:
            seconds = launch(measure_steps, 8_000_000, world_size=4, hosts=hosts)[0]
    """
    module = OneVector(num_bytes // 4).to(comm.device)
    server = make(module, comm, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    seconds = torch.zeros(num_steps + 1, dtype=torch.float64, device=comm.device)
    for step in range(num_steps + 1):
        module.weight.grad = torch.ones_like(module.weight)
        comm.barrier()
        begin = comm.now()
        server.push(num_samples=1)
        server.pull()
        seconds[step] = comm.now() - begin
    comm.all_reduce(seconds, "max")
    return seconds[1:].tolist()  # the first opens connections and touches new memory
