"""The asynchronous parameter server: nobody waits for anybody, so nobody's gradient is quite right.

Rank `server` only serves. A worker pulls the parameters, computes a gradient on samples of its own, pushes
it, and goes on at once; the server applies each gradient as it arrives. A slow worker no longer holds up the
others. The price: while a worker computes, others push, so its gradient is applied to parameters that have
moved on since it pulled.

    staleness of an update = number of updates applied between its worker's pull and itself

With W workers of equal speed it is about W-1. More updates a second, but each of them points a little past
the place where it is used: throughput rises, progress per sample does not.

**A bound.** With `bound=b` no update is ever staler than b: a worker that asks for parameters waits for its
turn if handing them out could make anybody's update staler (`may_pull`). b = 0 lets one worker at a time
compute: each gradient is taken at the newest parameters, and the run equals one process that takes the same
batches in the same order. b = W-1 lets all W compute at once and none begin its next step before all have
ended this one: synchronous rounds. No bound: as asynchronous as it gets. Q. Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server" (NIPS 2013) bound how many *steps* a worker
may be ahead of the slowest; here the thing that hurts is bounded itself.

**How it is built.** The server has one thread for each worker, which does what that worker asks; a lock holds
the parameters together. A worker that ends its stream says so (`leave`), and so does one whose step raises
(`run`); the others go on. A worker whose process is killed is noticed by its closed connection, and the
others go on too, if whatever started the processes lets them. `launch` and torchrun do not: there a rank that
dies ends the whole run. If the *server* dies, every worker gets PeerLost; there is no second copy of its state.

J. Dean et al., "Large Scale Distributed Deep Networks" (NIPS 2012), section 4.1 (Downpour SGD).
Buffers: copied once, at the start; a worker's running statistics stay its own, the server's never move.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable

import torch
from torch import nn

from course_lib.comm.communicator import Communicator
from course_lib.parallel.parameter_server.flat import (
    FlatParameters,
    MakeOptimizer,
    PeerLost,
    check_optimizer,
    check_server,
    copy_from,
    make_optimizer,
    number,
    reaching,
)
from course_lib.parallel.parameter_server.serving import LEAVE, PULL, PUSH, Serving, request_length
from course_lib.parallel.parameter_server.staleness import AsyncReport


class AsyncParameterServer:
    """Rank `server` keeps the parameters of `module`, all other ranks are workers. Made on all ranks at the
    same time.

    `optimizer`: a function from parameters to a torch optimizer. `bound`: the largest staleness allowed, or
    None.

        server = AsyncParameterServer(model, comm, lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        bound=4) report = server.run(my_batches, loss_fn)      # an AsyncReport on the server, None on workers

    At the end the trained parameters are in the server's module. Bytes:
    `plan.server_traffic.async_worker_bytes`. Needs gloo: NCCL runs the transfers of one process one after the
    other, so that one slow worker would hold up all.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        optimizer: MakeOptimizer,
        bound: int | None = None,
        server: int = 0,
        serving: Callable[..., Serving] = Serving,
    ) -> None:
        check_optimizer(comm, optimizer)
        check_server(comm, server)
        _check(comm, bound)
        self.module, self.comm, self.bound = module, comm, bound
        self.server, self.is_server = server, comm.rank == server
        self.flat = FlatParameters(module, comm)
        self._holds_parameters = False  # worker: pulled, not pushed
        self.optimizer = make_optimizer(comm, optimizer, self.flat.tensors) if self.is_server else None
        self._serving = serving
        copy_from(comm, module, server)

    def run(
        self,
        batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> AsyncReport | None:
        """Server: serve until all workers have left. Worker: train on `batches` (inputs, targets), its own,
        then leave.

        If a worker's step raises, its traceback is printed, the worker leaves, and the others go on; the
        server's report says so under `lost`. The server does not look at its `batches`.
        """
        if self.is_server:
            return self.serve()
        try:
            for inputs, targets in batches:
                self.pull()
                loss = loss_fn(self.module(inputs), targets)
                loss.backward()
                self.push(len(inputs), loss)
        except PeerLost:
            raise
        except Exception as error:
            traceback.print_exc()
            self.leave(f"{type(error).__name__}: {error}")
        else:
            self.leave()
        return None

    # --- a worker

    def pull(self) -> None:
        """Fetch the newest parameters. With a bound, this is where a worker waits."""
        if self._holds_parameters:
            raise RuntimeError(
                f"rank {self.comm.global_rank}: pull(): expected a push() after each pull(): the server waits for the "
                "gradient that belongs to the parameters it gave; call leave() when there is none to come"
            )
        self._ask(PULL)
        flat = self.flat.empty()
        with reaching(self.comm, "server", self.server):
            self.comm.recv(flat, self.server)
        self.flat.write(flat)
        self._holds_parameters = True

    def push(self, num_samples: int, loss: float | torch.Tensor) -> None:
        """Send the gradients of `loss`, the mean over `num_samples` samples, and clear them.

        Does not wait for the update.
        """
        if not self._holds_parameters:
            raise RuntimeError(
                f"rank {self.comm.global_rank}: push(): expected a pull() before each push(): the gradient "
                "belongs to the "
                "parameters that were pulled, and its staleness is counted from there"
            )
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise ValueError(
                f"rank {self.comm.global_rank}: push(num_samples): expected how many samples the loss is the mean of, "
                f"1 or more, got {num_samples!r}; a worker without samples does not push"
            )
        gradient, used = self.flat.take_gradients()
        self._ask(PUSH, num_samples, number(loss), *used)
        with reaching(self.comm, "server", self.server):
            self.comm.send(gradient, self.server)
        self._holds_parameters = False

    def leave(self, reason: str = "") -> None:
        """Say that this worker will push no more, and why if it is early; the server then no longer waits for
        it.
        """
        text = torch.frombuffer(bytearray(reason.encode()), dtype=torch.uint8) if reason else None
        self._ask(LEAVE, 0 if text is None else len(text))
        if text is not None:
            with reaching(self.comm, "server", self.server):
                self.comm.send(text, self.server)

    def _ask(self, kind: float, *numbers: float) -> None:
        if self.is_server:
            raise RuntimeError(f"rank {self.comm.global_rank} is the server: call serve() or run() there")
        request = torch.zeros(request_length(self.flat), dtype=torch.float64)
        request[: 1 + len(numbers)] = torch.tensor([kind, *numbers], dtype=torch.float64)
        with reaching(self.comm, "server", self.server):
            self.comm.send(request, self.server)

    # --- the server

    def serve(self) -> AsyncReport:
        """Do what the workers ask until all have left or are lost. Raises what an update raised."""
        if not self.is_server:
            raise RuntimeError(f"rank {self.comm.global_rank} is a worker; rank {self.server} serves")
        assert self.optimizer is not None
        return self._serving(self.flat, self.comm, self.optimizer, self.bound).run()


def _check(comm: Communicator, bound: object) -> None:
    where = f"rank {comm.global_rank}: "
    if comm.world_size < 2:
        raise ValueError(
            f"{where}comm: expected at least 2 ranks, since the server of an asynchronous run does not work "
            "itself, got 1; "
            "launch with world_size=2 or more, or use ParameterServer"
        )
    if comm.backend == "nccl":
        raise ValueError(
            f"{where}comm: expected gloo, since NCCL's transfers wait for each other and asynchronous ones "
            "must not, got nccl; "
            'launch with backend="gloo"'
        )
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
        raise ValueError(
            f"{where}bound: expected the largest staleness allowed, 0 or more, or None, got {bound!r}"
        )
