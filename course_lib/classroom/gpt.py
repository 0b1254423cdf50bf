"""A small decoder-only GPT: the model that has many layers, a tied embedding, and no BatchNorm.

The architecture of GPT-2 (A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section
2.3): learned positions, LayerNorm before each sub-layer and once more at the end, GELU, weights from a normal
distribution of 0.02, where the projections that end a sub-layer are divided by √(2 · num_layers), and the head's
matrix tied to the token embedding (O. Press and L. Wolf, 2017). The bias of queries, keys and values is left out.

In the shapes below: B samples, T positions, C = width, H heads of D = C/H numbers, V = vocab_size.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.classroom.datasets import ALPHABET
from course_lib.classroom.models import Batch, seeded

_STD = 0.02


class CausalAttention(nn.Module):
    """(B, T, C) -> (B, T, C): each position looks at itself and at those before it."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        # No bias: a key's would add the same to all scores of a query, which softmax does not see. Its gradient
        # would be rounding alone, and Adam, which divides by the gradient's size, would make steps of that.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        heads = self.qkv(x).view(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """(B, T, C) -> (B, T, C): attention, then a two-layer MLP of 4·C, each added to what came in."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.shrink(F.gelu(self.expand(self.norm2(x)))))


class GPT(nn.Module):
    """tokens, int64 (batch, time) with time ≤ context -> logits (batch, time, vocab_size), in the parameters' dtype.

    The logits at a position are those of the token that follows it. A batch of 0 samples works, backward too.

    num_heads: must divide `width`. dropout: the share set to 0 in training, of the embeddings, the attention weights
    and what each sub-layer adds. tied: the head's matrix is the token embedding itself, whose gradient is the sum of
    two: one comes first in backward, the other last. Initial values follow from `seed` alone.

    Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        vocab_size: int = 57,
        context: int = 16,
        width: int = 24,
        num_layers: int = 2,
        num_heads: int = 3,
        *,
        dropout: float = 0.0,
        tied: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or width % num_heads:
            raise ValueError(f"num_heads: expected a divisor of width = {width}, got {num_heads}")
        self.input_shape, self.num_classes = (context,), vocab_size
        with seeded(seed):
            self.tokens = nn.Embedding(vocab_size, width)
            self.positions = nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocab_size, bias=False)
            self._draw_weights()
        self.dropout = nn.Dropout(dropout)
        if tied:
            self.head.weight = self.tokens.weight

    def _draw_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_a_sub_layer = name.endswith(("attention.out.weight", "shrink.weight"))
                shrunk = math.sqrt(2 * len(self.blocks)) if ends_a_sub_layer else 1.0
                nn.init.normal_(parameter, std=_STD / shrunk)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        context = self.input_shape[0]
        if tokens.dim() != 2 or tokens.shape[1] > context:
            raise ValueError(
                f"tokens: expected (batch, time) with time at most {context}, the model's context, "
                f"got shape {tuple(tokens.shape)}"
            )
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, C)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, V)


def gpt_6m(*, seed: int = 0) -> GPT:
    """6.0 million parameters, for the benches; its vocabulary is that of the text corpus.

    Six layers of 288, six heads, a context of 64: 24 MB of gradients in float32, so that several buckets fill, and
    a step on a laptop still takes a fraction of a second.
    """
    return GPT(len(ALPHABET.characters), 64, 288, 6, 6, seed=seed)


def gpt_batches(model: GPT, num_batches: int, batch_size: int, *, seed: int = 1) -> list[Batch]:
    """Random batches (tokens, targets), both int64 (batch_size, context); a target is the next token."""
    generator = torch.Generator().manual_seed(seed)
    (context,) = model.input_shape
    size = (num_batches, batch_size, context + 1)
    drawn = torch.randint(model.num_classes, size, generator=generator)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in drawn]


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over all samples and positions: a scalar, the mean of the samples' means.

    logits: (batch, time, vocab_size). targets: int64 (batch, time). Without a sample it is 0, with gradients of 0: the
    mean of nothing would be NaN, which no weight of 0 makes good.
    """
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / max(targets.numel(), 1)
