"""The server's side of an asynchronous run: one thread for each worker, and one lock around the parameters."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

import torch

from course_lib.comm.communicator import Communicator
from course_lib.parallel.parameter_server.flat import FlatParameters, PeerLost, others, reaching
from course_lib.parallel.parameter_server.staleness import AsyncReport, Update, may_pull

PULL, PUSH, LEAVE = 0.0, 1.0, 2.0  # the first number of a request


def request_length(flat: FlatParameters) -> int:
    """A request is that many float64: kind, num_samples, loss, then for each parameter whether it has a
    gradient.
    """
    return 3 + len(flat.tensors)


class Serving:
    """Does what the workers ask, until all have left or are lost.

    `flat`: the parameters that `optimizer` updates.
    """

    may_pull: Callable[[int, Mapping[int, int], int], bool] = staticmethod(
        may_pull
    )  # an exercise replaces it

    def __init__(
        self, flat: FlatParameters, comm: Communicator, optimizer: torch.optim.Optimizer, bound: int | None
    ) -> None:
        self.flat, self.comm, self.optimizer, self.bound = flat, comm, optimizer, bound
        self.report, self.version = AsyncReport(), 0
        self.in_flight: dict[int, int] = {}  # worker -> the version it pulled
        self.queue: deque[int] = deque()  # workers that wait for parameters, first come first served
        self.serving = set(others(comm))
        self.state = threading.Condition()  # holds all of the above, and the parameters
        self._link = threading.Lock()  # one reply at a time: they share one link anyway
        self._error: BaseException | None = None
        self._began_s = comm.now()

    def run(self) -> AsyncReport:
        """Raises what an update or a rule raised."""
        for worker in others(self.comm):
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()
        with self.state:
            self.state.wait_for(lambda: not self.serving or self._error is not None)
        if self._error is not None:
            raise self._error
        return self.report

    def _serve(self, worker: int) -> None:
        """The thread of one worker."""
        lost, error = "", None
        try:
            lost = self._requests(worker)
        except PeerLost as gone:
            lost = str(gone)
        except BaseException as raised:  # in this thread nobody would see it
            error = raised
        with self.state:
            self.serving.discard(worker)
            self.in_flight.pop(worker, None)
            if lost:
                self.report.lost[worker] = lost
            self._error = self._error or error
            self.state.notify_all()

    def _requests(self, worker: int) -> str:
        """Answer `worker` until it leaves; its reason for leaving."""
        request = torch.empty(request_length(self.flat), dtype=torch.float64)
        while True:
            self._recv(request, worker)
            kind, num_samples, loss, *used = request.tolist()
            if kind == LEAVE:
                reason = torch.empty(int(num_samples), dtype=torch.uint8)
                if len(reason):
                    self._recv(reason, worker)
                return bytes(reason.tolist()).decode()
            if kind == PULL:
                parameters = self.take_turn(worker)
                with self._link, reaching(self.comm, "worker", worker):
                    self.comm.send(parameters, worker)
            else:
                gradient = self.flat.empty()
                self._recv(gradient, worker)
                self.apply(worker, gradient, int(num_samples), loss, [bool(flag) for flag in used])

    def _recv(self, tensor: torch.Tensor, worker: int) -> None:
        with reaching(self.comm, "worker", worker):
            self.comm.recv(tensor, worker)

    def take_turn(self, worker: int) -> torch.Tensor:
        """Wait until `worker` may have the parameters; a copy of them."""
        with self.state:
            self.queue.append(worker)
            self.state.wait_for(lambda: self.queue[0] == worker and self._may_pull())
            self.queue.popleft()
            return self.hand_out(worker)

    def hand_out(self, worker: int) -> torch.Tensor:
        """A copy of the parameters, of the version that `worker` now has. The caller holds the lock."""
        self.in_flight[worker] = self.version
        self.report.at_once = max(self.report.at_once, len(self.in_flight))
        self.state.notify_all()
        return self.flat.read()

    def _may_pull(self) -> bool:
        return self.bound is None or self.may_pull(self.version, dict(self.in_flight), self.bound)

    def apply(
        self, worker: int, gradient: torch.Tensor, num_samples: int, loss: float, used: list[bool]
    ) -> None:
        """Update the parameters with a gradient that has arrived."""
        with self.state:
            staleness = self.version - self.in_flight.pop(worker)
            self.flat.set_gradients(gradient, used)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.version += 1
            samples = num_samples + (self.report.updates[-1].samples if self.report.updates else 0)
            time_s = self.comm.now() - self._began_s
            self.report.updates.append(Update(time_s, worker, staleness, loss, samples))
            self.state.notify_all()
