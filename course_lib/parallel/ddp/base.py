"""What every rung of the ladder shares: equal models at the start, and knowing when a backward begins and ends.

Autograd calls a hook each time a parameter's gradient is complete. The first one of a backward asks autograd to call
again when all of the backward is done. What a rung does in between, and at the end, is all that tells the rungs apart.

A forward *opens* the wrapper for one backward. A gradient that comes while it is closed would be averaged with
nobody's, and the models would drift apart; so that is an error. Gradients of a forward inside `no_sync` are left
alone: a mark on its outputs tells (`marks`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from course_lib.comm.communicator import Communicator
from course_lib.comm.together import broadcast_tensors
from course_lib.parallel.ddp.checks import check_gradient, check_switches, check_wrapping, no_gradient
from course_lib.parallel.ddp.join import Join
from course_lib.parallel.ddp.marks import Marks
from course_lib.parallel.ddp.overlap import WAIT
from course_lib.parallel.ddp.replicas import Unchanged, check_same_model, without_module
from course_lib.parallel.ddp.unused import unused_parameters, used_by_nobody
from course_lib.parallel.ddp.wrapping import Hooks


class State(Enum):
    CLOSED = "no backward to be averaged is due"
    OPEN = "a forward has run; its backward has not begun"
    RUNNING = "its backward runs"


class DDP(nn.Module):
    """`module` with gradients that are the mean over all ranks once `backward()` returns. Called as the module is.

    module: the same architecture on every rank, on the Communicator's device. Its parameters and buffers are
        overwritten with rank 0's. What does not train (`requires_grad=False`) never travels again.
    find_unused_parameters: allow a forward to leave parameters out, other ones on each rank. Costs a walk through the
        graph, and an all-reduce of one byte for each parameter. Without it, a parameter that gets no gradient is an
        error.
    broadcast_buffers: before each forward in training mode, overwrite the buffers (BatchNorm's statistics) with
        rank 0's. A loss that is computed from buffers needs False where two forwards share a backward: as with
        PyTorch's own, the second forward overwrites what the first one computed with.

    After each backward every rank holds the same gradients: the sum over the ranks, divided by the number of ranks
    (once, before the sum). A parameter that no rank used keeps the gradient None. `state_dict` has the module's own
    keys; `load_state_dict` also takes those with `module.` before them that torch's wrapper writes.

    Raises TypeError for what is no module, no Communicator or no bool; ValueError for a module without trained
    parameters, on another device, or unlike rank 0's; RuntimeError for a model that changed after it was wrapped, for a
    second backward of one forward, for a backward that no forward of the wrapper belongs to, for a parameter without
    gradient, and for all that comes after a backward that did not end; NotImplementedError for sparse gradients and for
    `create_graph=True`.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        check_wrapping(module, comm, (DDP, DistributedDataParallel))
        check_switches(find_unused_parameters=find_unused_parameters, broadcast_buffers=broadcast_buffers)
        check_same_model(comm, module)
        self.module, self.comm = module, comm
        self.find_unused_parameters, self.broadcast_buffers = find_unused_parameters, broadcast_buffers
        self._names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.parameters_trained = list(self._names)
        broadcast_tensors(comm, [*module.parameters(), *module.buffers()])
        self.num_contributing = comm.world_size  # the divisor of the mean; `join` can make it smaller
        self._sync, self._state = True, State.CLOSED
        self._marks = Marks(comm.global_rank)
        self._join: Join | None = None
        self._waiting_for: set[nn.Parameter] = set()  # gradients that have not come in this backward
        self._unused: list[nn.Parameter] = []
        self._without_gradient: list[nn.Parameter] = []
        self._unchanged = Unchanged(module)
        self._hooks = Hooks(self)

    # --- what a rung adds

    def begin_backward(self) -> None:
        """The first gradient is about to come."""

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """`parameter.grad` will not change any more in this backward; None where the forward left it out."""

    @abstractmethod
    def average_gradients(self) -> None:
        """All gradients are there. Returns when each `parameter.grad` is the mean over the ranks."""

    @abstractmethod
    def average_zeros(self) -> None:
        """The same communication from a rank that has nothing to add."""

    # --- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._check_ready()
        training = torch.is_grad_enabled()
        if training and self._sync:
            root = self._join.announce() if self._join else 0
            if self.broadcast_buffers and self.training:
                broadcast_tensors(self.comm, self.module.buffers(), root)
        outputs = self.module(*inputs, **kwargs)
        if training:
            self._marks.leave(outputs, self._sync, needed=self.find_unused_parameters or not self._sync)
        if training and self._sync:
            self._state = State.OPEN
            find = self.find_unused_parameters
            self._unused = unused_parameters(outputs, self.parameters_trained) if find else []
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in here, and their backwards, send nothing: gradients add up on each rank by itself.

        The first forward and backward after it average the whole sum. The forward belongs inside, too: what counts is
        where the forward ran.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def join(self, divide_by_initial_world_size: bool = True) -> AbstractContextManager[Join]:
        """Train inside it where ranks have different numbers of batches: see `Join`."""
        return Join(self, divide_by_initial_world_size)

    # --- backward

    @torch.no_grad()
    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Called by autograd when `parameter.grad` is complete."""
        if self._marks.local:
            return
        if self._state is State.OPEN:
            self._begin()
        if self._state is not State.RUNNING or parameter not in self._waiting_for:
            raise RuntimeError(
                f"rank {self.comm.global_rank}: a gradient of {self._names[parameter]} came that no forward of the "
                "wrapper belongs to, so it would not be averaged. Did backward run twice for one forward, or did "
                "forward run on model.module? Call the wrapper once for each backward; to add up gradients on each "
                "rank by itself, put forward and backward inside `with model.no_sync():`; to train the module alone "
                "again, call model.unwrap()"
            )
        check_gradient(self.comm, self._names[parameter], parameter)
        self._waiting_for.discard(parameter)
        self.gradient_ready(parameter)

    def _begin(self) -> None:
        self._state = State.RUNNING
        Variable._execution_engine.queue_callback(self._on_end)  # after the last gradient of this backward
        self._waiting_for = set(self.parameters_trained).difference(self._unused)
        self._without_gradient = [parameter for parameter in self._unused if parameter.grad is None]
        self.begin_backward()
        for parameter in self._unused:
            self.gradient_ready(parameter)

    @torch.no_grad()
    def _on_end(self) -> None:
        if self._waiting_for:
            missing = [self._names[p] for p in self.parameters_trained if p in self._waiting_for]
            raise RuntimeError(no_gradient(self.comm.global_rank, missing, self.find_unused_parameters))
        with self.comm.span(WAIT, "wait"):
            self.average_gradients()
        if self.find_unused_parameters:
            for parameter in used_by_nobody(self.comm, self.parameters_trained, self._without_gradient):
                parameter.grad = None
        self._state = State.CLOSED  # last: what raises above leaves sums under way, and nothing may follow

    def shadow(self, root: int) -> None:
        """One step's communication from a rank that has no batch left (`Join`)."""
        if self.broadcast_buffers and self.training:
            broadcast_tensors(self.comm, self.module.buffers(), root)
        with torch.no_grad():
            self.average_zeros()
        if self.find_unused_parameters:
            used_by_nobody(self.comm, self.parameters_trained, self.parameters_trained)

    # --- state

    def unwrap(self) -> nn.Module:
        """The module, free again: its gradients are no longer averaged, and this wrapper cannot be used any more."""
        self._hooks.remove()
        return self.module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if (
            kwargs.get("destination") is not None
        ):  # one part of a larger module, which expects its parts' names
            return super().state_dict(*args, **kwargs)
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(without_module(state_dict, self.module), *args, **kwargs)

    def _check_ready(self) -> None:
        rank = self.comm.global_rank
        if not self._hooks.active:
            raise RuntimeError(
                f"rank {rank}: the module was unwrapped, or wrapped again, since; use the new wrapper"
            )
        if self._state is State.RUNNING:
            raise RuntimeError(
                f"rank {rank}: the last backward did not end, since something in it raised. Sums of its gradients may "
                "be under way, on other ranks too. Let the error end the program, or wrap the module again on all ranks"
            )
        self._unchanged.check(rank)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a wrapped model cannot be copied or pickled: it belongs to this process's group of ranks. Copy "
            "model.module, or save model.state_dict()"
        )
