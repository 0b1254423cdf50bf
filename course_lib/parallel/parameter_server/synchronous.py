"""The synchronous parameter server: N workers share a batch, one of them also keeps the parameters.

One step, for a batch of B samples:

    every rank   takes its slice, computes the mean loss of its B_r samples and the gradient g_r        no
    message push         sends g_r and B_r to the server
    S up from each server       g = Σ B_r/B · g_r, the gradient of the mean over the *whole* batch; optimizer
    step      no message pull         the server sends the new parameters to every worker
    S down to each

S is the bytes of the parameters. The server receives (N-1)·S and sends (N-1)·S, all through its own link, so
a step takes at least 2(N-1)·S/rate: twice the workers, twice the time. That is why this way ends at a handful
of devices. Every rank holds a full copy of the model; the server also N gradients and the optimizer's state.

**Where the mean's division happens**: once in each rank (its loss is a mean over its own slice) and once on
the server, which weights each gradient with B_r/B. Averaging the N gradients without weights is right only if
all slices are equally long: the mean of means. What counts as a sample is yours: for a loss over tokens, push
the number of valid tokens.

M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014). Buffers
(BatchNorm's running statistics) are copied once, at the start; after that every rank's are its own, as its
forward passes leave them. BatchNorm also normalises with the statistics of the rank's slice, so a model with
it does not equal one process on the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from course_lib.comm.communicator import Communicator
from course_lib.comm.messages import describe
from course_lib.parallel.parameter_server.flat import (
    FlatParameters,
    MakeOptimizer,
    check_optimizer,
    check_server,
    copy_from,
    make_optimizer,
    number,
    others,
    reaching,
)
from course_lib.plan.partition import chunk_bounds

Aggregate = Callable[[list[torch.Tensor], list[int]], torch.Tensor]
"""(flat gradients, numbers of samples) -> flat gradient."""


def weighted_mean(gradients: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """Σ B_r/B · g_r: the gradient of the mean over all samples, from the gradients of the slices' means.

    `gradients`: one flat tensor for each rank that had samples, in rank order; `counts`: its number of
    samples. The inputs do not change. Added in rank order, so the result is the same, bit for bit, on every
    run.
    """
    total = sum(counts)
    result = gradients[0] * (counts[0] / total)
    for gradient, count in zip(gradients[1:], counts[1:], strict=True):
        result.add_(gradient, alpha=count / total)
    return result


class Synchronous:
    """What the servers that wait for all workers share: the slices, and a step made of push and pull."""

    def __init__(
        self, module: nn.Module, comm: Communicator, optimizer: MakeOptimizer, aggregate: Aggregate | None
    ) -> None:
        check_optimizer(comm, optimizer)
        if aggregate is not None and not callable(aggregate):
            raise TypeError(
                f"rank {comm.global_rank}: aggregate: expected a function (gradients, counts) -> gradient, "
                f"got {aggregate!r}"
            )
        self.module, self.comm = module, comm
        self.flat = FlatParameters(module, comm)
        self.aggregate = weighted_mean if aggregate is None else aggregate
        self._fetched = (
            self.flat.empty()
        )  # where the parameters arrive; fresh memory in each step would cost time
        self.loss = math.nan  # of the last step: the mean over all its samples

    def push(self, num_samples: int, loss: float | torch.Tensor = math.nan) -> None:
        raise NotImplementedError

    def pull(self) -> float:
        raise NotImplementedError

    def step(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> float:
        """One training step. Every rank is handed the *whole* batch and works on its slice, which may be
        empty.

        `loss_fn(outputs, targets)` is a mean over samples. Returns the whole batch's mean loss, the same on
        all ranks.
        """
        start, stop = chunk_bounds(len(inputs), self.comm.world_size)[self.comm.rank]
        loss = torch.tensor(math.nan)
        if stop > start:
            loss = loss_fn(self.module(inputs[start:stop]), targets[start:stop])
            loss.backward()
        self.push(stop - start, loss)
        return self.pull()

    def _header(self, num_samples: int, loss: float | torch.Tensor, used: list[bool]) -> torch.Tensor:
        """What a gradient's receiver must know about it: float64 of 2 + number of parameters."""
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 0:
            raise ValueError(
                f"rank {self.comm.global_rank}: push(num_samples): expected how many samples the loss is the "
                "mean of, 0 or "
                f"more, got {num_samples!r}"
            )
        numbers = [num_samples, number(loss), *used]
        return torch.tensor(numbers, dtype=torch.float64, device=self.comm.device)

    def _aggregated(
        self, headers: list[list[float]], gradients: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[bool]] | None:
        """(the gradient of the step, which parameters have one), and note its loss; None if no rank had a
        sample.

        A rank without samples is left out: its mean is 0/0, and one NaN would reach every parameter.
        """
        present = [(header, g) for header, g in zip(headers, gradients, strict=True) if header[0] > 0]
        if not present:
            self.loss = math.nan
            return None
        counts = [int(header[0]) for header, _ in present]
        self.loss = sum(
            count / sum(counts) * header[1] for count, (header, _) in zip(counts, present, strict=True)
        )
        result = self.aggregate([gradient for _, gradient in present], counts)
        self._check_aggregated(result, gradients[0])
        return result, [any(flags) for flags in zip(*(header[2:] for header, _ in present), strict=True)]

    def _check_aggregated(self, result: Any, like: torch.Tensor) -> None:
        if isinstance(result, torch.Tensor) and (result.shape, result.dtype) == (like.shape, like.dtype):
            return
        got = (
            f"shape {tuple(result.shape)}, {result.dtype}"
            if isinstance(result, torch.Tensor)
            else repr(result)
        )
        raise ValueError(
            f"rank {self.comm.global_rank}: aggregate: expected it to return one flat gradient like those it "
            "was given, shape "
            f"{tuple(like.shape)}, {describe(like).split()[-1]}; got {got}"
        )


class ParameterServer(Synchronous):
    """The parameters of `module` live on rank `server`, which also works; `optimizer` is built there alone.

    `optimizer`: a function from parameters to a torch optimizer. `aggregate(gradients, counts)`: how the
    server makes one flat gradient out of those of the ranks that had samples (default: `weighted_mean`). Made
    on all ranks at the same time; all begin with the server's parameters and buffers.

        server = ParameterServer(model, comm, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        loss = loss_fn(model(inputs), targets)      # this rank's slice, a mean over its samples
        loss.backward()
        server.push(len(inputs), loss)
        mean_loss = server.pull()

    On the server: `optimizer`, the optimizer itself (None elsewhere). Bytes of a step: `plan.server_traffic`.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        optimizer: MakeOptimizer,
        aggregate: Aggregate | None = None,
        server: int = 0,
    ) -> None:
        super().__init__(module, comm, optimizer, aggregate)
        check_server(comm, server)
        self.server, self.is_server = server, comm.rank == server
        self.optimizer = make_optimizer(comm, optimizer, self.flat.tensors) if self.is_server else None
        self._received = {rank: self.flat.empty() for rank in others(comm)} if self.is_server else {}
        copy_from(comm, module, server)

    def push(self, num_samples: int, loss: float | torch.Tensor = math.nan) -> None:
        """Send this rank's gradients, those of the mean loss over its `num_samples` samples, and clear them.

        The server receives all of them, aggregates, and updates the parameters. If no rank has a sample,
        nothing changes.
        """
        gradient, used = self.flat.take_gradients()
        header = self._header(num_samples, loss, used)
        if not self.is_server:
            with reaching(self.comm, "server", self.server):
                self.comm.send(header, self.server)
                self.comm.send(gradient, self.server)
            return
        headers, gradients = [header] * self.comm.world_size, [gradient] * self.comm.world_size
        for rank in others(self.comm):
            headers[rank], gradients[rank] = torch.empty_like(header), self._received[rank]
            with reaching(self.comm, "worker", rank):
                self.comm.recv(headers[rank], rank)
                self.comm.recv(gradients[rank], rank)
        self._update([one.tolist() for one in headers], gradients)

    def _update(self, headers: list[list[float]], gradients: list[torch.Tensor]) -> None:
        assert self.optimizer is not None
        aggregated = self._aggregated(headers, gradients)
        if aggregated is not None:
            self.flat.set_gradients(*aggregated)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def pull(self) -> float:
        """Fetch the server's parameters into the module.

        Returns the mean loss of the step pushed last (NaN: unknown).
        """
        loss = torch.tensor([self.loss], dtype=torch.float64, device=self.comm.device)
        if self.is_server:
            parameters = self.flat.read(out=self._fetched)
            for rank in others(self.comm):
                with reaching(self.comm, "worker", rank):
                    self.comm.send(loss, rank)
                    self.comm.send(parameters, rank)
            return self.loss
        with reaching(self.comm, "server", self.server):
            self.comm.recv(loss, self.server)
            self.comm.recv(self._fetched, self.server)
        self.flat.write(self._fetched)
        self.loss = loss.item()
        return self.loss
