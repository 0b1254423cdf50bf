"""One rank, seen from the kernel: its process, its channel, its output, and how far it got."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from course_lib.comm.board import Board
from course_lib.runtime.errors import Failure, Frame
from course_lib.runtime.options import Options
from course_lib.runtime.output import Stream
from course_lib.runtime.processes import ForkServer, numbers


@dataclass
class Member:
    """Made by `start_member`. `state` is "starting", then the last thing the rank said: "hello", "ready", "running",
    "done", "failed"; "dead" when its process ended without a word; "inside torch" when torch's own timeout ran out.
    """

    rank: int
    number: int  # its name at the fork server
    channel: Connection
    streams: list[Stream]
    stacks: Any  # the file into which faulthandler writes
    state: str = "starting"
    pid: int = 0
    port: int | None = None
    place: tuple[str, str, int] = ("", "", 0)  # backend, device, GPUs found
    done: Any = None  # (ended, ledger, trace, pickled result)
    failure: Failure | None = None
    gone: float | None = None  # when its channel closed

    def tell(self, *message: Any) -> None:
        try:
            self.channel.send_bytes(pickle.dumps(message))
        except OSError:
            pass  # it is gone: the team's loop finds out how

    def listen(self) -> tuple[str, list[Any]] | None:
        """Take one message of the rank, and note what it says; None when it will say no more."""
        try:
            kind, *content = pickle.loads(self.channel.recv_bytes())
            if kind == "done":
                self.done = (*content, self.channel.recv_bytes())
        except (EOFError, OSError):
            self.gone = time.monotonic()
            return None
        if kind == "hello":
            self.pid, self.port = content
        elif kind == "ready":
            self.place = tuple(content)  # type: ignore[assignment]
        elif kind == "failed":
            data = content[0]
            data["frames"] = [Frame(**frame) for frame in data["frames"]]
            self.failure = Failure(self.rank, **data)
        if kind != "progress":
            self.state = kind
        return kind, content

    def read_stacks(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read()

    def close(self) -> None:
        self.channel.close()
        self.stacks.close()
        for stream in self.streams:
            stream.close()


def start_member(rank: int, options: Options, server: ForkServer, board: Board) -> Member:
    """Have the fork server start `rank`, on its host if there are virtual ones, and tell it who it is."""
    ours, theirs = socket.socketpair()
    pipes = [os.pipe(), os.pipe()]
    stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by Member.close)
    streams = [Stream(pipe[0], rank, is_error=index == 1) for index, pipe in enumerate(pipes)]
    member = Member(rank, next(numbers), Connection(ours.detach()), streams, stacks)
    namespaces: list[tuple[str, int]] = []
    try:
        namespaces = options.hosts.namespaces_of(rank) if options.hosts else []
        handed = [theirs.fileno(), pipes[0][1], pipes[1][1], board.fd, stacks.fileno()]
        server.start(member.number, handed + [fd for _, fd in namespaces], [kind for kind, _ in namespaces])
        member.channel.send_bytes(json.dumps(_setup(rank, options)).encode())
    except BaseException:
        member.close()
        raise
    finally:
        theirs.close()
        for fd in [write for _, write in pipes] + [fd for _, fd in namespaces]:
            os.close(fd)
    return member


def _setup(rank: int, options: Options) -> dict[str, Any]:
    """What the rank must know before it imports anything, and who it is."""
    hosts, world_size = options.hosts, options.world_size
    host_of = [hosts.host_of(other) if hosts else 0 for other in range(world_size)]
    local_world_size = host_of.count(host_of[rank])
    local_rank = host_of[:rank].count(host_of[rank])
    interface = "eth0" if hosts and hosts.how == "namespaces" else "lo" if sys.platform == "linux" else "lo0"
    names = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
    }
    env = {"GLOO_SOCKET_IFNAME": interface, **os.environ}
    if hosts:
        env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    here = {"address": "127.0.0.1", "pacer": "", "bytes_per_s": 0.0}
    return (hosts.setup_of(rank) if hosts else here) | {
        "sys_path": [path or os.getcwd() for path in sys.path],
        "cwd": os.getcwd(),
        "env": env | {name: str(value) for name, value in names.items()} | dict(options.env or {}),
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
        "host_of": host_of,
        "backend": options.backend,
        "timeout": options.timeout,
        "threads": options.threads,
        "memory_limit": options.memory_limit_bytes,
    }
