"""Make plain `torch.distributed` calls visible on the board, so that a hang in them is reported like any other.

On the backend "ring" every collective writes its own entry, so here only the wait is noted.

Only Python-level calls can be seen. What torch starts from C++ (its DDP's all_reduce during backward) is bounded by the
process group's own timeout instead; the launcher reads that error as a hang.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.board import Board
from course_lib.comm.torch_collectives import RING

_SAME_SIZES = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
_COLLECTIVES = (
    *_SAME_SIZES,
    *("all_gather_single", "reduce_scatter_single", "all_gather", "reduce_scatter", "all_to_all"),
    *("all_to_all_single", "gather", "scatter", "barrier", "monitored_barrier", "all_gather_object"),
    *("broadcast_object_list", "gather_object", "scatter_object_list"),
    "_broadcast_coalesced",  # the parameters and buffers of torch's DDP, from a call in Python
)


def watch_torch(board: Board) -> None:
    """Wrap the functions of `torch.distributed` in this process; they do the same as before."""
    for name in _COLLECTIVES:
        if hasattr(dist, name):
            _replace(name, _collective(getattr(dist, name), name.lstrip("_"), board))
    for name in ("send", "recv", "isend", "irecv"):
        _replace(name, _point_to_point(getattr(dist, name), name, board))
    wait = dist.Work.wait

    @functools.wraps(wait)
    def watched_wait(*args: Any, **kwargs: Any) -> Any:
        with board.wait("wait()"):
            return wait(*args, **kwargs)

    setattr(dist.Work, "wait", watched_wait)  # noqa: B010 (mypy refuses the plain assignment)


def _replace(name: str, watched: Callable) -> None:
    for module in (dist, dist.distributed_c10d):
        if hasattr(module, name):
            setattr(module, name, watched)


def _collective(function: Callable, name: str, board: Board) -> Callable:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        ranks = _group_ranks(args, kwargs)
        if board.rank not in ranks:
            return function(*args, **kwargs)
        if _on_ring(args, kwargs):
            with board.wait(name):
                return function(*args, **kwargs)
        signature = _signature(args, kwargs) if name in _SAME_SIZES else ""
        with board.collective(name, ranks, signature), board.wait(name):
            return function(*args, **kwargs)

    return watched


_inside = threading.local()


def _point_to_point(function: Callable, name: str, board: Board) -> Callable:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "message", False):  # since torch 2.14, send calls isend: one message, one note
            return function(*args, **kwargs)
        peer = _peer(args, kwargs)
        if peer is None:
            board.messages.stop()
        elif not kwargs.get("tag"):
            board.message("send" in name, _group_ranks(args, kwargs), peer, _signature(args, kwargs))
        _inside.message = True
        try:
            with board.wait(name, peer):
                return function(*args, **kwargs)
        finally:
            _inside.message = False

    return watched


def _peer(args: tuple, kwargs: dict) -> int | None:
    """The other end, as a global rank; None: anybody."""
    for name in ("group_dst", "group_src"):
        if kwargs.get(name) is not None:
            ranks, place = _group_ranks(args, kwargs), kwargs[name]
            if place not in range(len(ranks)):
                raise ValueError(f"{name}: expected 0…{len(ranks) - 1}, a rank of the group, got {place!r}")
            return ranks[place]
    return args[1] if len(args) > 1 else kwargs.get("dst", kwargs.get("src"))


def _group(args: tuple, kwargs: dict) -> Any:
    groups = [value for value in (*args, kwargs.get("group")) if isinstance(value, dist.ProcessGroup)]
    return groups[0] if groups else dist.group.WORLD


def _group_ranks(args: tuple, kwargs: dict) -> list[int]:
    return dist.get_process_group_ranks(_group(args, kwargs))


def _on_ring(args: tuple, kwargs: dict) -> bool:
    return dist.get_backend(_group(args, kwargs)) == RING


def _signature(args: tuple, kwargs: dict) -> str:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return f"{tensors[0].numel()} x {str(tensors[0].dtype).removeprefix('torch.')}" if tensors else ""
