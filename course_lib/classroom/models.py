"""The small models of the course. Their sizes divide by nothing: what works with 57 and 19 works with 64.

A model's initial values follow from its `seed` alone, on every rank and whatever was drawn before; building one draws
nothing from the global generator. Each model knows what goes into it and out of it (`input_shape`, `num_classes`), so
`sample_batches` can make batches for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
"""(inputs, targets)"""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, random numbers follow from `seed`; afterwards the global generator goes on as if nothing had been."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class MLP(nn.Module):
    """Four linear layers with tanh between: (batch, num_inputs) -> (batch, num_classes).

    tied: the two square layers in the middle share one weight, whose gradient is the sum of two; each has its own bias.
    frozen: the first layer does not learn (`requires_grad=False`).
    unused: one more layer, which forward never calls; its gradients stay None.
    dropout: the share of the hidden values that is set to 0 in training.
    """

    def __init__(
        self,
        num_inputs: int = 57,
        hidden: int = 19,
        num_classes: int = 7,
        *,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.input_shape, self.num_classes = (num_inputs,), num_classes
        with seeded(seed):
            self.first = nn.Linear(num_inputs, hidden)
            self.second = nn.Linear(hidden, hidden)
            self.third = nn.Linear(hidden, hidden)
            self.head = nn.Linear(hidden, num_classes)
            self.spare = nn.Linear(3, hidden) if unused else None
        self.dropout = nn.Dropout(dropout)
        if tied:
            self.third.weight = self.second.weight
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(inputs))  # (batch, hidden)
        x = self.dropout(torch.tanh(self.second(x)))
        x = torch.tanh(self.third(x))
        return self.head(x)  # (batch, num_classes)


class DigitsCNN(nn.Module):
    """Two convolutions and a linear layer: (batch, 1, 8, 8) -> (batch, 10), for the handwritten digits.

    batch_norm: normalise after each convolution. A slice of a batch then gives other outputs than the whole batch.
    dropout: the share of the features before the last layer that is set to 0 in training.
    """

    def __init__(
        self, channels: int = 11, *, batch_norm: bool = False, dropout: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__()
        self.input_shape, self.num_classes = (1, 8, 8), 10
        norm = nn.BatchNorm2d if batch_norm else nn.Identity
        with seeded(seed):
            self.features = nn.Sequential(
                nn.Conv2d(1, channels, 3, padding=1),  # (batch, channels, 8, 8)
                norm(channels),
                nn.ReLU(),
                nn.MaxPool2d(2),  # (batch, channels, 4, 4)
                nn.Conv2d(channels, 2 * channels, 3, padding=1),
                norm(2 * channels),
                nn.ReLU(),
                nn.MaxPool2d(2),  # (batch, 2 * channels, 2, 2)
                nn.Flatten(),
                nn.Dropout(dropout),
            )
            self.head = nn.Linear(8 * channels, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(inputs))


def digits_mlp(hidden: int = 57, *, seed: int = 0) -> MLP:
    """An MLP for the handwritten digits as rows: (batch, 64) -> (batch, 10)."""
    return MLP(64, hidden, 10, seed=seed)


def sample_batches(
    model: MLP | DigitsCNN,
    num_batches: int,
    batch_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> list[Batch]:
    """Random batches for `model`: inputs (batch_size, *input_shape) of `dtype`, targets int64 (batch_size,).

    No two elements are equal, so a slice in the wrong place is noticed.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, *model.input_shape)
    return [
        (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(model.num_classes, (batch_size,), generator=generator),
        )
        for _ in range(num_batches)
    ]


def shuffled_batches(
    inputs: torch.Tensor, targets: torch.Tensor, batch_size: int, *, seed: int = 0
) -> list[Batch]:
    """One epoch of a data set in an order that follows from `seed`. Samples that fill no batch are left out."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    full = len(inputs) // batch_size * batch_size
    return [(inputs[rows], targets[rows]) for rows in order[:full].split(batch_size)]


def accuracy(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The share of `inputs` that the model, in evaluation mode, puts into the right class."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return (model(inputs).argmax(1) == targets).float().mean().item()
    finally:
        model.train(training)
