"""The reductions: what happens where two values of the same element meet.

Each is a name and a torch function that works in place, in the tensor's own dtype (a bf16 sum is a bf16 sum,
as in torch). AVG adds on the way and divides once at the end; the collective that uses it says where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SUM, AVG, MAX, MIN, PRODUCT = "sum", "avg", "max", "min", "product"
BAND, BOR, BXOR = "band", "bor", "bxor"  # bit by bit, of whole numbers and bools

_FUNCTIONS: dict[str, Callable] = {
    SUM: torch.add,
    AVG: torch.add,
    MAX: torch.maximum,
    MIN: torch.minimum,
    PRODUCT: torch.mul,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def op_name(op: Any) -> str:
    """The name of `op`, given as a name ("sum", "SUM") or as a member of `torch.distributed.ReduceOp`."""
    if isinstance(op, str):
        if op.lower() in _FUNCTIONS:
            return op.lower()
    else:
        for name in _FUNCTIONS:
            if op == torch_op(name):
                return name
        if op == dist.ReduceOp.PREMUL_SUM:
            raise NotImplementedError(
                "op: PREMUL_SUM is for NCCL alone; multiply the tensor by the factor, then use sum"
            )
    raise ValueError(f"op: expected one of {', '.join(_FUNCTIONS)} or torch's ReduceOp for it, got {op!r}")


def torch_op(name: str) -> Any:
    """torch.distributed's member for a name of ours."""
    return getattr(dist.ReduceOp, name.upper())


def check_op(op: Any, tensor: torch.Tensor) -> str:
    """The name of `op`, after making sure that it means something for `tensor`'s dtype."""
    name = op_name(op)
    if name == AVG and not tensor.is_floating_point():
        raise ValueError(
            f"op: the average of {tensor.dtype} values is not {tensor.dtype}; "
            "sum them and divide in floating point, or convert the tensor first"
        )
    return name


def combine(name: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """`out = a op b`, element by element, without allocating; `out` may be one of them."""
    _FUNCTIONS[name](a, b, out=out)


@functools.cache
def combines(name: str, dtype: torch.dtype) -> bool:
    """Whether torch can reduce values of `dtype` on the CPU. It cannot add float8 numbers, for example."""
    try:
        one = torch.empty(1, dtype=dtype)
        combine(name, one, one, out=one)
    except RuntimeError:
        return False
    return True


def average_(name: str, total: torch.Tensor, n: int) -> None:
    """Where the division of AVG happens: `total` of `n` ranks, in place. Other reductions leave it alone."""
    if name == AVG:
        total.div_(n)
