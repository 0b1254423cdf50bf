"""Equal models on all ranks: that they can be equal, that they are at the start, and that nobody changed one since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from course_lib.comm.communicator import Communicator
from course_lib.comm.together import broadcast_bytes


def describe_model(module: nn.Module) -> list[str]:
    """A line for each parameter and buffer: name, shape, dtype, whether it is trained."""
    lines = [
        f"{name}: {list(p.shape)} {p.dtype}{_layout(p)}{'' if p.requires_grad else ', frozen'}"
        for name, p in module.named_parameters()
    ]
    return lines + [f"{name}: buffer {list(b.shape)} {b.dtype}" for name, b in module.named_buffers()]


def _layout(tensor: torch.Tensor) -> str:
    return "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"


def check_same_model(comm: Communicator, module: nn.Module) -> None:
    """Every rank compares its model's description with rank 0's, before anything of the model is sent.

    Two broadcasts: 8 bytes, then the text. Raises ValueError on a rank that differs, with the first difference.
    """
    mine = describe_model(module)
    wanted = broadcast_bytes(comm, "\n".join(mine).encode()).decode().split("\n")
    if mine == wanted:
        return
    for own, other in zip([*mine, "nothing"], [*wanted, "nothing"], strict=False):
        if own != other:
            raise ValueError(
                f"rank {comm.global_rank}: module: expected the same model as rank {comm.ranks[0]}'s; "
                f"this rank has {own!r} where rank {comm.ranks[0]} has {other!r}. Build the model from the same "
                "arguments on every rank"
            )


def without_module(state_dict: Any, module: nn.Module) -> Any:
    """`state_dict` as `module` wants it: without the `module.` that torch's wrapper writes before each key.

    Not for a model with a part of that name: what counts is which of the two fits its own keys better.
    """
    if not isinstance(state_dict, Mapping):
        return state_dict  # load_state_dict says what it expected
    own = module.state_dict().keys()
    short = {str(key).removeprefix("module."): value for key, value in state_dict.items()}
    return short if len(own & short.keys()) > len(own & state_dict.keys()) else state_dict


class Unchanged:
    """Remembers which parameters a module trains, and says when that is no longer so.

    A wrapper knows only the parameters it found; a new one would train on each rank by itself, and the models drift
    apart without a word.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, self._now(module)

    @staticmethod
    def _now(module: nn.Module) -> dict[str, tuple]:
        now = {name: (p, p.shape, p.dtype) for name, p in module.named_parameters() if p.requires_grad}
        # A buffer may be another tensor in each forward, but not one of another shape.
        return now | {f"buffer {name}": (None, b.shape, b.dtype) for name, b in module.named_buffers()}

    def check(self, rank: int) -> None:
        """Raises RuntimeError naming the first parameter that came, went, or is another one now."""
        now = self._now(self._module)
        for name in [*now, *self._before]:
            new, old = now.get(name), self._before.get(name)
            if new is None or old is None or new[0] is not old[0] or new[1:] != old[1:]:
                raise RuntimeError(
                    f"rank {rank}: the model changed after it was wrapped: {name} {_difference(old, new)}. The "
                    "wrapper knows what it was given. Change the model first, then wrap it (again)"
                )


def _difference(old: tuple | None, new: tuple | None) -> str:
    if old is None:
        return "is new or trained only now"
    if new is None:
        return "is gone or frozen"
    if old[1:] != new[1:]:
        return f"was {list(old[1])} {old[2]} and is {list(new[1])} {new[2]}"
    return "is another"
