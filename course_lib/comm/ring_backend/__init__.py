"""`backend="ring"`: the course's own collectives as a torch.distributed backend, written in Python.

torch's DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard and plain `dist.*` calls never move a byte
themselves. They ask a *process group* to, and a process group may be a Python class. This one answers with the
functions of `comm.collectives`, unchanged, so the industry's tools train on the ring that you can read (or on yours:
`plugged`).

    asked of the group                       what runs                            file
    all_reduce, reduce_scatter, all_gather   the ring                             ring.py
    broadcast, reduce                        a binary tree                        tree.py
    gather, scatter, all_to_all              messages, straight to their rank     group.py
    send, recv, barrier                      gloo's own                           base.py

Each group owns a gloo group, its *wire*, for the messages, and one thread that does the collectives in the order in
which they were asked for, while the caller goes on (`work.py`). That is what lets torch's DDP overlap them with
backward.

In the launcher, `launch(fn, world_size=4, backend="ring")`: every message of every collective stands in the ledger,
exactly, also those that torch itself started. Anywhere else, for example under plain torchrun:

    from course_lib.comm import ring_backend
    ring_backend.register()
    dist.init_process_group("ring")

It is a backend for the CPU, also where there are GPUs: tensors on a GPU are refused. What a group is asked for and
cannot do raises NotImplementedError, which says what to do instead; nothing is quietly left to gloo.

Two limits that it cannot refuse by itself. A DDP hook that torch has in C++ (`_register_builtin_comm_hook` with
FP16_COMPRESS) fails, since a future made in Python has no type there: take `default_hooks.fp16_compress_hook` instead.
And `dist.set_timeout` reaches the barrier but not the messages: give `timeout` to init_process_group or new_group.

How a backend joins torch: "Customize Process Group Backends Using Cpp Extensions" in the PyTorch tutorials (2022); a
class in Python needs no extension. How DDP uses one: S. Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training" (2020), section 3.3.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.ring_backend.context import attach, plugged
from course_lib.comm.ring_backend.group import RingGroup
from course_lib.comm.torch_collectives import RING

__all__ = ["RingGroup", "attach", "plugged", "register"]


def register() -> None:
    """Make "ring" a backend of torch.distributed in this process. A second call does nothing."""
    if RING not in dist.Backend.backend_list:
        _keep_from_compile()
        dist.Backend.register_backend(RING, _create, extended_api=True, devices=["cpu"])


def _keep_from_compile() -> None:
    """torch.compile runs a group's methods as they are: it cannot look inside a process group.

    Done here and not in the classes, since it imports the compiler: seconds, which a notebook need not wait for.
    """
    for cls in RingGroup.__mro__[: RingGroup.__mro__.index(dist.ProcessGroup)]:
        for name, method in list(vars(cls).items()):
            is_torchs = hasattr(dist.ProcessGroup, name) or not name.startswith("_")
            if is_torchs and inspect.isfunction(method):
                setattr(cls, name, torch.compiler.disable(method))


def _create(options: Any, _: Any) -> RingGroup:
    return RingGroup(options)
