"""What a rank does: connect to the others, run the functions it is handed, report, and wait until it may end.

It speaks with the launcher over one channel. From the rank: "hello", "ready", "progress", "done", "failed"; to the
rank: "connect", "run", "bye". A rank that has finished or failed stays alive and connected until the launcher ends it:
a closed connection would look to its peers like a fault of its own, and hide the first cause.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import linecache
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm import ring_backend
from course_lib.comm.board import Board
from course_lib.comm.communicator import Communicator
from course_lib.comm.pacer import Pacer
from course_lib.runtime.errors import Frame
from course_lib.runtime.limits import MemoryLimit
from course_lib.runtime.pickling import pack_result, unpack_task
from course_lib.runtime.watch import watch_torch

_CONNECT_S = 60.0


def main(channel: Connection, board_fd: int, stacks_fd: int, setup: dict[str, Any]) -> None:
    """Serve until the launcher says "bye" or is gone. `setup`: see `team.Team`."""
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    stacks = os.fdopen(stacks_fd, "w")
    faulthandler.enable(stacks)  # a crash in C leaves its Python stack
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)  # the launcher asks where a rank stands
    board = Board(board_fd, setup["world_size"], setup["rank"])
    try:
        comm = _connect(channel, board, setup)
        watch_torch(board)
        limit = MemoryLimit(setup["memory_limit"], comm.device) if setup["memory_limit"] else None
        _say(channel, "ready", comm.backend, str(comm.device), torch.cuda.device_count())
    except BaseException as error:
        _say(channel, "failed", _failure(error))
    while True:
        try:
            kind, *content = channel.recv()
        except (EOFError, OSError):
            return
        if kind == "bye":
            if comm.backend == "nccl":
                dist.destroy_process_group()
            return
        _run(channel, comm, board, limit, *content)


def _say(channel: Connection, *message: Any) -> None:
    try:
        channel.send_bytes(pickle.dumps(message))
    except OSError:
        os._exit(1)  # the launcher is gone


def _connect(channel: Connection, board: Board, setup: dict[str, Any]) -> Communicator:
    torch.set_num_threads(setup["threads"])
    rank, world_size = setup["rank"], setup["world_size"]
    backend, device = _backend(setup)
    ring_backend.register()
    patience = datetime.timedelta(seconds=max(setup["timeout"], _CONNECT_S))
    store, port = None, None
    if rank == 0:  # the others connect to rank 0's store, on whatever port was free
        store = dist.TCPStore(setup["address"], 0, world_size, True, patience, wait_for_workers=False)
        port = store.port
    _say(channel, "hello", os.getpid(), port)
    _, port = channel.recv()
    os.environ |= {"MASTER_ADDR": setup["address"], "MASTER_PORT": str(port)}
    with board.wait("connecting"):
        store = store or dist.TCPStore(setup["address"], port, world_size, False, patience)
        # No device_id for nccl: torch would then have all ranks, not only the members, make each subgroup.
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
        pacer = Pacer(setup["pacer"], setup["bytes_per_s"]) if setup["pacer"] else None
        comm = Communicator(device=device, board=board, host_of=setup["host_of"], pacer=pacer)
        ring_backend.attach(comm)
        dist.barrier()
    # The launcher watches the waits it can see; torch's own limit catches the others a moment later.
    timeout = datetime.timedelta(seconds=setup["timeout"] + 1.0)
    set_timeout = getattr(
        dist, "set_timeout", dist.distributed_c10d._set_pg_timeout
    )  # public since torch 2.14
    set_timeout(timeout, dist.group.WORLD)
    comm._report = lambda message: _say(channel, "progress", message)
    return comm


def _backend(setup: dict[str, Any]) -> tuple[str, torch.device]:
    backend, local_rank, needed = setup["backend"], setup["local_rank"], setup["local_world_size"]
    enough = torch.cuda.device_count() >= needed and dist.is_nccl_available()
    if backend == "auto":
        backend = "nccl" if enough else "gloo"
    if backend != "nccl":
        return backend, torch.device("cpu")
    if not enough:
        raise ValueError(
            f'backend="nccl" needs a GPU for each of the {needed} ranks on this host; torch finds '
            f'{torch.cuda.device_count()}. Use backend="gloo", or fewer ranks.'
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return backend, device


def _run(
    channel: Connection,
    comm: Communicator,
    board: Board,
    limit: MemoryLimit | None,
    run: int,
    t0: float,
    payload: bytes,
    sources: dict[str, str],
) -> None:
    board.begin_run(run)
    comm.begin_run(t0)
    try:
        fn, args = unpack_task(payload, sources)
        del payload
        _say(channel, "running")
        value = _call(fn, comm, args)
        ended = time.monotonic()
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
        result = pack_result(value)
        _flush()
        _say(channel, "done", ended, comm.ledger, comm.trace)
        channel.send_bytes(result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the function did not return
        out_of_memory = limit.explain(error) if limit else None
        _flush()
        failure = _failure(error)
        if out_of_memory:
            failure |= {"exc_type": "OutOfMemoryError", "exc_message": out_of_memory}
        _say(channel, "failed", failure)


def _call(fn: Callable, comm: Communicator, args: tuple) -> Any:
    return fn(comm, *args)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # the function closed it, or put something else in its place
    ctypes.CDLL(None).fflush(None)  # what C code printed


def _failure(error: BaseException) -> dict[str, Any]:
    """The exception as plain data, without this module's own frames."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    frames = [
        Frame(file, line or 0, function, linecache.getline(file, line or 0).strip())
        for file, line, function, _ in traceback.extract_tb(tb)
    ]
    return {
        "exc_type": type(error).__qualname__,
        "exc_message": _text(error),
        "frames": [asdict(frame) for frame in frames],
        "causes": _causes(error),
        "traceback": "".join(traceback.format_exception(type(error), error, tb)),
        "at": time.monotonic(),
    }


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be made: __str__ raised {type(second).__name__})"


def _causes(error: BaseException) -> list[str]:
    """What led to `error`, the nearest first; the members of an exception group."""
    found = [f"one of them: {type(e).__qualname__}: {_text(e)}" for e in getattr(error, "exceptions", ())]
    seen = {id(error)}
    while True:
        hidden = None if error.__suppress_context__ else error.__context__
        cause = error.__cause__ or hidden
        if cause is None or id(cause) in seen:
            return found
        how = "caused by" if error.__cause__ is not None else "while handling"
        found.append(f"{how} {type(cause).__qualname__}: {_text(cause)}")
        seen.add(id(cause))
        error = cause
