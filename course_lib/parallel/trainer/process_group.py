"""The process group of a script that may be started by torchrun, restarted by it, or by nobody.

torchrun's agent keeps one store for all attempts, and gloo's ranks leave their addresses in it. After a restart a new
rank may read the address of a dead one, if it is quicker than the rank that overwrites it: "connection refused", or it
waits for ever. (Seen with torch 2.14, in three restarts of four; the agent's TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
avoids it, too.) So the ranks of an attempt first agree on a part of the store that nobody has written to.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.communicator import Communicator


@contextmanager
def process_group() -> Iterator[Communicator]:
    """The group this process is in: one that exists, else torchrun's, else one of this process alone.

    nccl and a GPU for each rank where there are enough of them, else gloo on the CPU. What was made here is destroyed
    at the end.
    """
    ours = not dist.is_initialized()
    if ours:
        _initialise()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    try:
        yield Communicator(device=device)
    finally:
        if ours:
            dist.destroy_process_group()


def _initialise() -> None:
    on_gpu = (
        torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)) and dist.is_nccl_available()
    )
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))
        store = fresh_part(store, rank, world_size)
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size)


def fresh_part(store: Any, rank: int, world_size: int) -> dist.PrefixStore:
    """A part of the torch store `store`, the same on all ranks, in which nothing is left of an earlier attempt.

    Each rank leaves a word that it has just made up; rank 0 answers every word it finds with its own, which names the
    part, until all ranks have said that they read it. A dead rank's word gets an answer, too, which nobody reads.
    """
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"word of {rank}", word)
        part = store.get(f"answer to {word}").decode()  # waits
        store.set(f"{part} read by {rank}", "")
        return dist.PrefixStore(part, store)
    missing, deadline = set(range(1, world_size)), time.monotonic() + store.timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"word of {other}"]):
                store.set(f"answer to {store.get(f'word of {other}').decode()}", word)
            if store.check([f"{word} read by {other}"]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0: ranks {sorted(missing)} of {world_size} did not come; look at their output"
            )
        time.sleep(0.01)
    return dist.PrefixStore(word, store)
