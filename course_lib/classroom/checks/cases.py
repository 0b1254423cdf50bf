"""The inputs on which a function is judged: lengths, shapes and dtypes, with another value in every element.

The values can be read: 100·(rank+1) + position, so that 203 is rank 1's element 3. Where a sum must be *rounded*, other
values show whether all ranks added in the same order. Tensors are built with gaps around them where their form says
so, and the gaps are looked at afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

_GAP = 77  # fills what does not belong to a tensor
_EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Case:
    """One input. `form`: "plain" (1-D), "scalar" (0-dim) or "transposed" (2-D, not contiguous).

    `values`: "marked" (see above), "rounding" (sums depend on the order) or "mixed" (no rank has all the largest).
    `op`: passed on if the function takes one; None is a sum, too. `times`: a repeat count, for the exercises that
    take one.
    """

    length: int
    dtype: torch.dtype = torch.float32
    op: str | None = None
    form: str = "plain"
    values: str = "marked"
    times: int = 0

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """S: the bytes of the whole tensor."""
        return self.length * self.itemsize

    def __str__(self) -> str:
        text = f"{self.length} {str(self.dtype).removeprefix('torch.')}"
        text += {"plain": "", "scalar": " of shape ()", "transposed": " in a transposed view"}[self.form]
        text += f", num_rounds={self.times}" if self.times else ""
        return f"{text}, op={self.op}" if self.op not in (None, "sum") else text

    def of_rank(self, rank: int) -> torch.Tensor:
        """Rank `rank`'s values, 1-D."""
        i = torch.arange(self.length, dtype=torch.float64)
        if self.values == "marked":
            return (100 * (rank + 1) + i).to(self.dtype)
        if self.values == "mixed":
            return (100 * ((3 * rank + i) % 4) + i).to(self.dtype)
        return ((1 + i / 7) / 3**rank + 17 * rank / 13).to(self.dtype)

    def reduced(self, world_size: int) -> torch.Tensor:
        """The right result, 1-D, in float64."""
        each = torch.stack([self.of_rank(rank).double() for rank in range(world_size)])
        if self.op == "max":
            return each.max(dim=0).values
        return each.sum(dim=0) / (world_size if self.op == "avg" else 1)

    def close(self, got: torch.Tensor, right: torch.Tensor, world_size: int) -> torch.Tensor:
        """Element by element: right, or as near as any order of rounded additions may come."""
        eps = _EPS.get(self.dtype, 0.0)
        slack = 0.0 if self.op == "max" else eps * (world_size + 1) * right.abs()
        return (got.double() - right).abs() <= slack


@dataclass
class Placed:
    """A tensor as a function is handed it, and the memory around it."""

    tensor: torch.Tensor
    around: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (memory, which is a gap)

    def __post_init__(self) -> None:
        self._lies = self._place()

    @property
    def moved(self) -> bool:
        """Whether `tensor` is another view, or of other memory, than it was."""
        return self._place() != self._lies

    def _place(self) -> tuple[int, torch.Size, tuple[int, ...]]:
        return self.tensor.data_ptr(), self.tensor.shape, self.tensor.stride()

    @property
    def gaps_changed(self) -> bool:
        return any(bool((memory[gaps] != _GAP).any()) for memory, gaps in self.around)


def place(values: torch.Tensor, form: str) -> Placed:
    """A tensor of these 1-D `values` in the given form."""
    if form == "scalar":
        return Placed(values.reshape(()).clone())
    if form != "transposed":
        return Placed(values.clone())
    rows, columns = values.numel() // 3, 3
    memory = torch.full((columns, 2 * rows + 1), _GAP, dtype=values.dtype)
    gaps = torch.ones_like(memory, dtype=torch.bool)
    gaps[:, 1::2] = False
    tensor = memory[:, 1::2].t()
    tensor.copy_(values.view(rows, columns))
    return Placed(tensor, [(memory, gaps)])


def place_strided(length: int, dtype: torch.dtype) -> Placed:
    """A 1-D tensor to be filled: every second element of a longer one, all of it filled with another value."""
    memory = torch.full((2 * length + 1,), _GAP, dtype=dtype)
    gaps = torch.ones_like(memory, dtype=torch.bool)
    gaps[1::2] = False
    return Placed(memory[1::2], [(memory, gaps)])


PLAIN = Case(12)  # divisible by 1, 2, 3 and 4
REDUCE_CASES = (
    PLAIN,
    Case(7),
    Case(1),
    Case(2),
    Case(1, form="scalar"),
    Case(0),
    Case(12, form="transposed"),
    Case(5, torch.float64),
    Case(9, torch.int64),
    Case(1857),
    Case(11, values="rounding"),
    Case(6, torch.bfloat16, values="rounding"),
)
OP_CASES = (
    *(replace(case, op="sum") for case in REDUCE_CASES),
    Case(12, op="avg"),
    Case(7, torch.float64, op="avg"),
    Case(7, torch.int64, op="max", values="mixed"),
)
"""For a function with a parameter `op`."""
