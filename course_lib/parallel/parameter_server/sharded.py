"""The sharded parameter server: every rank is a worker, and the server of 1/N of the parameters.

The vector of all parameters is cut into N chunks (`plan.partition`); rank r serves chunk r. Push: each rank
cuts its gradient in the same way and sends chunk r to rank r. Pull: rank r sends the new chunk r to
everybody.

    every rank   sends (N-1)/N·S gradients and (N-1)/N·S parameters, and receives as much

The total over all ranks is 2(N-1)·S, exactly that of one server; what changes is the balance. Each link now
carries 2(N-1)/N·S, less than 2·S however many ranks there are, where the server's carried (N-1)·S in each
direction. The optimizer's state is shared out on the way: 1/N of it on each rank.

Look at what push and pull have become. After the push rank r holds the sum of everybody's chunk r: a *reduce-
scatter*. After the pull everybody holds all chunks: an *all-gather*. Without an update in between it is an
all-reduce, and the next chapter finds a way around a ring to do both with messages between neighbours only.

Keys spread over several servers: M. Li et al., "Scaling Distributed Machine Learning with the Parameter
Server" (OSDI 2014), section 3. An optimizer here sees flat pieces of parameters, so it must work element by
element (SGD, Adam, AdamW do; those that use a matrix's shape or a layer's norm do not). The same holds for
`aggregate`.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from course_lib.comm.communicator import Communicator
from course_lib.comm.views import chunks_of
from course_lib.parallel.parameter_server.flat import MakeOptimizer, copy_from, make_optimizer
from course_lib.parallel.parameter_server.synchronous import Aggregate, Synchronous
from course_lib.plan.partition import chunk_bounds


def sharded_step(
    comm: Communicator, parameters: torch.Tensor, gradient: torch.Tensor, learning_rate: float
) -> None:
    """parameters -= learning_rate · (sum of all ranks' gradients), in place on every rank; each serves its
    chunk.

    `parameters`: 1-D, the same on all ranks; `gradient`: this rank's, as long. Each rank sends 2(N-1)/N·S
    bytes.
    """
    mine = chunks_of(parameters, comm.world_size)[comm.rank]
    for part in push_chunks(comm, gradient):
        mine.sub_(part, alpha=learning_rate)
    pull_chunks(comm, parameters)


def push_chunks(comm: Communicator, flat: torch.Tensor) -> list[torch.Tensor]:
    """Send chunk r of `flat` to rank r, for every r.

    Returns what all ranks have for this rank's chunk, in rank order.
    """
    chunks = chunks_of(flat, comm.world_size)
    parts = [torch.empty_like(chunks[comm.rank]) for _ in chunks]
    parts[comm.rank] = chunks[comm.rank]
    exchange_all(comm, send=chunks, receive=parts)
    return parts


def pull_chunks(comm: Communicator, flat: torch.Tensor) -> None:
    """Send this rank's chunk of `flat` to all, and receive theirs into their places."""
    chunks = chunks_of(flat, comm.world_size)
    exchange_all(comm, send=[chunks[comm.rank]] * comm.world_size, receive=chunks)


def exchange_all(comm: Communicator, send: list[torch.Tensor], receive: list[torch.Tensor]) -> None:
    """send[r] goes to rank r and receive[r] comes from it, for every other rank r.

    Step k exchanges with the rank k places on and the rank k places back, so that in each step every link
    carries one message each way. If everybody began with rank 0, its link would choke while the others rest.
    """
    N, rank = comm.world_size, comm.rank
    for k in range(1, N):
        to, source = (rank + k) % N, (rank - k) % N
        comm.exchange(send[to], to, receive[source], source)


class ShardedParameterServer(Synchronous):
    """`ParameterServer` with its work shared out: same arguments but `server`, same push, pull and step.

    `optimizer` is built on every rank, for that rank's chunk (None where the chunk is empty). The chunk here
    is the truth: change parameters by hand between steps, and the next pull brings the served values back.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        optimizer: MakeOptimizer,
        aggregate: Aggregate | None = None,
    ) -> None:
        super().__init__(module, comm, optimizer, aggregate)
        copy_from(comm, module, root=0)
        start, stop = chunk_bounds(self.flat.numel, comm.world_size)[comm.rank]
        self.chunk = self.flat.read()[start:stop].clone()
        self._pieces = self._cut(start, stop)
        pieces = [piece for _, _, piece in self._pieces]
        self.optimizer = make_optimizer(comm, optimizer, pieces) if pieces else None

    def _cut(self, start: int, stop: int) -> list[tuple[int, slice, nn.Parameter]]:
        """(number of the parameter, where in the chunk, a view of it) for each parameter that reaches into
        the chunk.
        """
        pieces = []
        for number, (first, last) in enumerate(self.flat.bounds):
            where = slice(max(first, start) - start, min(last, stop) - start)
            if where.start < where.stop:
                pieces.append((number, where, nn.Parameter(self.chunk[where])))
        return pieces

    def push(self, num_samples: int, loss: float | torch.Tensor = math.nan) -> None:
        """Send every chunk of this rank's gradient to its server, and serve: aggregate and update this rank's
        chunk.
        """
        gradient, used = self.flat.take_gradients()
        headers = self._all_headers(self._header(num_samples, loss, used))
        aggregated = self._aggregated(headers, push_chunks(self.comm, gradient))
        if aggregated is None or self.optimizer is None:
            return
        flat, any_used = aggregated
        for number, where, piece in self._pieces:
            piece.grad = flat[where] if any_used[number] else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pull(self) -> float:
        """Fetch all chunks into the module. Returns the mean loss of the step pushed last."""
        chunks_of(self._fetched, self.comm.world_size)[self.comm.rank].copy_(self.chunk)
        pull_chunks(self.comm, self._fetched)
        self.flat.write(self._fetched)
        return self.loss

    def _all_headers(self, header: torch.Tensor) -> list[list[float]]:
        """Everybody's header, in rank order: every rank is a server and must know all weights."""
        headers = [torch.empty_like(header) for _ in range(self.comm.world_size)]
        headers[self.comm.rank] = header
        exchange_all(self.comm, send=[header] * self.comm.world_size, receive=headers)
        return [one.tolist() for one in headers]
