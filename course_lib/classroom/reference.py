"""The truth every way to train is held against: one process, the whole batch, plain PyTorch.

`train` runs it; `differences` compares. A way to train is equal if `differences` finds nothing after every step, at a
tolerance that has a reason: 0 where the same numbers are added in the same order, and otherwise the rounding of the
dtype. Train in float64 where you can: rounding then stays near 1e-15, and any real mistake, a lost sample or a mean of
means, is a million million times larger.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Run:
    """What a training gave, step by step.

    losses: the loss of each step's batch, before its update. gradients: of each step, name -> gradient as the optimizer
    saw it (after clipping), None for a parameter that got none. states: the state_dict after each step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The state_dict at the end."""
        return self.states[-1]


def train(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    loss_fn: Loss = F.cross_entropy,
    clip_norm: float | None = None,
) -> Run:
    """Train a copy of `model`, one step for each batch. `model` itself stays as it is.

    optimizer: makes the optimizer from the parameters. loss_fn: the mean over the batch. clip_norm: scale the gradient
    down to this norm where it is longer.
    """
    model = copy.deepcopy(model)
    update = optimizer(model.parameters())
    run = Run()
    for inputs, targets in batches:
        update.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        run.losses.append(loss.item())
        run.gradients.append({name: _kept(p.grad) for name, p in model.named_parameters()})
        update.step()
        run.states.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    return run


def _kept(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()


# --- comparing


def differences(
    got: Mapping[str, torch.Tensor | None] | Sequence[float],
    expected: Mapping[str, torch.Tensor | None] | Sequence[float],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    what: str = "",
) -> list[str]:
    """One sentence for each thing that differs; an empty list if all is equal.

    Takes two state_dicts (or gradients, with None for none), or two lists of losses. rtol = atol = 0 asks for the same
    values bit for bit (0.0 and -0.0 count as equal). NaN equals nothing.
    """
    ours, truth = _named(got), _named(expected)
    label = f"{what}: " if what else ""
    found = [f"{label}{name} is missing" for name in truth if name not in ours]
    found += [f"{label}{name} is unexpected" for name in ours if name not in truth]
    for name in truth:
        if name in ours and (problem := _difference(ours[name], truth[name], rtol, atol)):
            found.append(f"{label}{name} {problem}")
    return found


def _named(values: Mapping[str, torch.Tensor | None] | Sequence[float]) -> dict[str, torch.Tensor | None]:
    if isinstance(values, Mapping):
        return dict(values)
    return {f"loss of step {i}": torch.tensor(loss, dtype=torch.float64) for i, loss in enumerate(values)}


def _difference(
    got: torch.Tensor | None, expected: torch.Tensor | None, rtol: float, atol: float
) -> str | None:
    if got is None or expected is None:
        return None if got is expected else f"is {_describe(got)}, expected {_describe(expected)}"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"is {_describe(got)}, expected {_describe(expected)}"
    ours, truth = got.detach().cpu().double(), expected.detach().cpu().double()
    wrong = ~((ours - truth).abs() <= atol + rtol * truth.abs()) & ~(ours == truth)
    if not wrong.any():
        return None
    gap = torch.where(wrong, (ours - truth).abs().nan_to_num(float("inf"), float("inf")), -1.0)
    i = int(gap.argmax())
    a, b = ours.flatten()[i].item(), truth.flatten()[i].item()
    return f"differs in {int(wrong.sum())} of {wrong.numel()} elements, most at {i}: {a!r}, expected {b!r}"


def _describe(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
