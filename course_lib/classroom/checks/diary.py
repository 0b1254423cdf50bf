"""What a rank did, written down while it does it, in a file that outlives the rank.

A learner's function may raise, hang or end its process. What the launcher then reports is about the whole run; a grader
wants to say how far *each* rank came. So every rank keeps a diary: one record for each thing that begins or ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from course_lib.comm.communicator import Communicator
from course_lib.comm.messages import nbytes

_GATE = "gate"  # 8 bytes for each rank: how many cases it has finished


@dataclass(frozen=True)
class Message:
    """A call of send, recv or exchange, as it began; a side that takes no part is None."""

    op: str
    to: int | None = None
    sent: int = 0
    source: int | None = None
    received: int = 0

    def __str__(self) -> str:
        if self.op == "exchange":
            return f"exchange ({self.sent} bytes to rank {self.to}, {self.received} from rank {self.source})"
        if self.op == "send":
            return f"send of {self.sent} bytes to rank {self.to}"
        return f"recv of {self.received} bytes from rank {self.source}"


@dataclass(frozen=True)
class Observation:
    """A call of the learner's function that came to its end, as one rank saw it. Bytes and messages: the ledger's."""

    result: Any  # what is judged: a tensor, or None if there was nothing to read
    returned: str  # "" for None, else a description of what the function returned
    returned_result: Any  # the same as a tensor, if it can be read as one
    complaints: tuple[str, ...]  # memory changed that should not
    sent: int
    received: int
    messages: int
    peers: tuple[int, ...]  # the ranks it sent to
    collectives: tuple[str, ...]  # torch's or the library's, that it called


@dataclass
class CaseLog:
    """One case on one rank. `pending`: the message it had begun and not ended."""

    messages: list[Message] = field(default_factory=list)
    pending: Message | None = None
    raised: tuple[str, str, str] | None = None  # type, message, the learner's line
    ended: Observation | None = None


class Diary:
    """The pen: rank `rank` writes, into `folder`."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = os.open(Path(folder) / str(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._gate = os.open(Path(folder) / _GATE, os.O_RDWR | os.O_CREAT, 0o600)
        self._rank = rank

    def write(self, kind: str, content: Any = None) -> None:
        os.write(self._file, pickle.dumps((kind, content)))

    def finished(self, cases: int, world_size: int) -> None:
        """Say that this rank has finished so many cases, and wait for the others.

        No communication: a rank that has finished must not look like one that waits in the learner's function.
        """
        os.pwrite(self._gate, cases.to_bytes(8, "little"), 8 * self._rank)
        while True:
            page = os.pread(self._gate, 8 * world_size, 0).ljust(8 * world_size, b"\0")
            if all(int.from_bytes(page[8 * r : 8 * r + 8], "little") >= cases for r in range(world_size)):
                return
            time.sleep(0.0003)

    def close(self) -> None:
        os.close(self._file)
        os.close(self._gate)

    @contextlib.contextmanager
    def watching(self, comm: Communicator) -> Iterator[None]:
        """Inside, every send, recv and exchange of `comm` is written down before it begins and when it returns."""
        comm.send = self._written(comm.send, lambda tensor, to: Message("send", to, nbytes(tensor)))  # type: ignore[method-assign]
        comm.recv = self._written(  # type: ignore[method-assign]
            comm.recv, lambda tensor, source: Message("recv", source=source, received=nbytes(tensor))
        )
        comm.exchange = self._written(  # type: ignore[method-assign]
            comm.exchange,
            lambda send, to, recv, source, async_op=False: Message(
                "exchange", to, nbytes(send), source, nbytes(recv)
            ),
        )
        try:
            yield
        finally:
            del comm.send, comm.recv, comm.exchange

    def _written(self, call: Callable, describe: Callable[..., Message]) -> Callable:
        @wraps(call)
        def written(*args: Any, **kwargs: Any) -> Any:
            message = None
            with contextlib.suppress(Exception):  # wrong arguments: the call itself says what is wrong
                message = describe(*args, **kwargs)
            if message is not None:
                self.write("message", message)
            value = call(*args, **kwargs)
            self.write("over")
            return value

        return written


def read(folder: str, rank: int) -> list[CaseLog]:
    """The cases that rank `rank` began, in order."""
    logs: list[CaseLog] = []
    path = Path(folder) / str(rank)
    if not path.exists():
        return logs
    with path.open("rb") as file:
        while True:
            try:
                kind, content = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the end, or a record cut short
                return logs
            if kind == "began":
                logs.append(CaseLog())
            elif kind == "message":
                logs[-1].messages.append(content)
                logs[-1].pending = content
            elif kind == "over":
                logs[-1].pending = None
            elif kind == "raised":
                logs[-1].raised = content
            elif kind == "ended":
                logs[-1].ended = content


def as_tensor(value: Any) -> torch.Tensor | None:
    """A tensor, or a flat list or array of numbers or one-element tensors, as a small 1-D tensor; else None."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        if any(isinstance(number, str) for number in value):
            return None
        try:
            value = torch.tensor([float(number) for number in value], dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            return None
    if not isinstance(value, torch.Tensor) or value.numel() > 100_000 or value.is_complex():
        return None
    return value.detach().cpu().reshape(-1).clone()
