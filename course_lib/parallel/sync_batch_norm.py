"""BatchNorm over the whole batch, though each rank holds a slice of it.

BatchNorm (S. Ioffe and C. Szegedy, "Batch Normalization", 2015, algorithm 1) is the one common layer in which samples
meet: each channel is normalised with the mean and variance of *all* samples of the batch. A rank that takes those of
its own slice computes another function, and with 2 samples on each rank a poor one. Here the ranks add up their
statistics in forward, and in backward what each sample owes to them.

Legend, for one channel: x a value, n their number over all ranks, μ mean, σ² variance, x̂ = (x - μ)/√(σ² + ε).

    forward     y = γ·x̂ + β
    backward    dβ = Σ dy    dγ = Σ dy·x̂    dx = γ/√(σ² + ε) · (dy - Σ dy / n - x̂ · Σ dy·x̂ / n)

Forward sends (μ, M₂ = Σ (x - μ)², n) of the rank's own slice, and combines them as Chan, Golub and LeVeque (1979) do:

    μ = Σ nᵣμᵣ / n,    M₂ = Σ M₂ᵣ + nᵣ(μᵣ - μ)²,    σ² = M₂/n

Sums of x and x² would do on paper; on a machine their difference loses all digits where the mean is large against the
spread. Ranks may hold different numbers of samples, or none.

In a step each layer with C channels costs two small collectives that nothing hides: forward an all-gather of 2C + 1
numbers from each rank, 4·(N-1)·(2C + 1) bytes sent by each in float32, backward an all-reduce of 2C numbers,
2·(N-1)/N·8C bytes. It is latency that one pays for.

In backward Σ dy runs over all ranks, so dx is the gradient of the *sum* of the ranks' losses. dγ and dβ are the rank's
own part of theirs, as every layer's are: DistributedDataParallel averages them like the others. Left out: gradients of
gradients, and `join`: a rank that has no batch must still call the model, with 0 samples.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from course_lib.comm.communicator import Communicator


class SyncBatchNorm(_BatchNorm):
    """(B, C, ...) -> the same shape and dtype: each channel normalised over the batches of all ranks of `comm`.

    Its parameters, buffers and arguments are nn.BatchNorm's: num_features is C, `momentum=None` averages over all
    batches, running_var has n - 1 below. B may differ between ranks, and be 0. Statistics of float16 and bfloat16 are
    computed and sent in float32. In evaluation mode it is nn.BatchNorm: it sends nothing.

    Blocking, forward and backward; every rank of `comm` must come. Raises ValueError for another shape, and, on every
    rank, for a channel with one value in all.
    """

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm: expected a Communicator, got {type(comm).__name__}")
        self.comm = comm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training:
            own_statistics = self.running_mean is None
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                own_statistics,
                0.0,
                self.eps,
            )
        mean, variance, count = global_moments(self.comm, input.detach())
        if count == 1:
            raise ValueError(
                f"rank {self.comm.global_rank}: expected more than 1 value per channel when training, got 1 on all "
                f"ranks together (here the input has shape {tuple(input.shape)}): a single value has no variance. "
                "Take a larger batch, or model.eval()"
            )
        self._track(mean, variance, count)
        invstd = torch.rsqrt(variance + self.eps)
        return _Normalise.apply(input, self.weight, self.bias, mean, invstd, count, self.comm)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        if count == 0:
            return
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_((1 - share) * running.to(new.dtype) + share * new)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features or not input.is_floating_point():
            raise ValueError(
                f"rank {self.comm.global_rank}: input: expected floating point numbers of shape "
                f"(batch, {self.num_features}, ...), got {str(input.dtype).removeprefix('torch.')} of shape "
                f"{tuple(input.shape)}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy with parameters of its own, on the same Communicator: a connection cannot be copied."""
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        memo[id(self.comm)] = self.comm
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    @classmethod
    def convert(cls, module: nn.Module, comm: Communicator) -> nn.Module:
        """`module` with every BatchNorm in it replaced, in place; a BatchNorm itself gives a new module.

        The parameters and buffers are those that were there, not copies: an optimizer that holds them still does,
        frozen ones stay frozen, and `state_dict` keeps its keys. So it may come before or after the optimizer is made,
        but before the model is wrapped. A layer used in two places stays one layer. Hooks on a BatchNorm stay behind:
        register them after.

        Raises ValueError, and converts nothing, for a lazy BatchNorm that has not seen its input yet.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm) and layer.num_features == 0:
                raise ValueError(
                    f"rank {comm.global_rank}: module: {name or 'it'}, a {type(layer).__name__}, does not know its "
                    "number of channels yet; run one batch through the model, then convert it"
                )
        return cls._converted(module, comm, {})

    @classmethod
    def _converted(cls, module: nn.Module, comm: Communicator, done: dict[nn.Module, nn.Module]) -> nn.Module:
        if module not in done:
            done[module] = cls._like(module, comm) if isinstance(module, _BatchNorm) else module
            for name, child in module._modules.items():
                if child is not None:
                    done[module]._modules[name] = cls._converted(child, comm, done)
        return done[module]

    @classmethod
    def _like(cls, layer: _BatchNorm, comm: Communicator) -> SyncBatchNorm:
        new = cls(
            layer.num_features, comm, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
        )
        new._parameters.update(layer._parameters)
        new._buffers.update(layer._buffers)
        new.training = layer.training
        return new


def global_moments(comm: Communicator, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(mean (C,), variance (C,), n) of each channel of `x`, (B, C, ...), over all ranks: the same bits on each.

    One all-gather. The variance has n below. In float64 for float64, else in float32. For n = 0 they are 0.
    """
    x = x.to(_working_dtype(x))
    num_channels, count = x.shape[1], x.numel() // x.shape[1]
    mine = x.new_zeros(2 * num_channels + 1)
    mean, M2 = mine[:num_channels], mine[num_channels:-1]
    if count:
        dims = _all_but_channels(x)
        mean.copy_(x.mean(dims))
        M2.copy_((x - _per_channel(mean, x)).square_().sum(dims))
        mine[-1] = count
    each = x.new_empty(comm.world_size, len(mine))
    comm.all_gather(each, mine)
    means, M2s, counts = each.split([num_channels, num_channels, 1], dim=1)
    n = counts.sum().clamp(min=1)
    mean = (counts * means).sum(dim=0) / n
    M2 = (M2s + counts * (means - mean).square()).sum(dim=0)
    return mean, M2 / n, int(counts.sum())


class _Normalise(torch.autograd.Function):
    """x, γ, β -> γ·x̂ + β, where the statistics depend on every rank's x."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, mean, invstd, count: int, comm: Communicator) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.count, ctx.comm = count, comm
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = _normalised(x, mean, invstd)
        if weight is not None:
            y.mul_(_per_channel(weight, x))
        if bias is not None:
            y.add_(_per_channel(bias, x))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        x, weight, mean, invstd = ctx.saved_tensors
        dy, x_hat = grad.to(mean.dtype), _normalised(x, mean, invstd)
        dims = _all_but_channels(x)
        sums = torch.stack([dy.sum(dims), (dy * x_hat).sum(dims)])  # (2, C)
        own = sums.clone()
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:  # the same on every rank: the model is
            ctx.comm.all_reduce(sums)
            mean_dy, mean_dy_x_hat = (_per_channel(one, x) for one in sums / max(ctx.count, 1))
            scale = invstd if weight is None else invstd * weight
            d_x = ((dy - mean_dy - x_hat * mean_dy_x_hat) * _per_channel(scale, x)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = own[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = own[0].to(ctx.bias_dtype)
        return d_x, d_weight, d_bias, None, None, None, None


def _normalised(x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor) -> torch.Tensor:
    """x̂, in new memory."""
    return (x.to(mean.dtype) - _per_channel(mean, x)).mul_(_per_channel(invstd, x))


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(C,) -> (1, C, 1, ...), to meet x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _working_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
