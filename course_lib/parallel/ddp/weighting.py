"""The loss of a rank, weighted so that DDP's average is the mean over all samples.

DDP averages over *ranks*. If each rank's loss is the mean of its own samples, the result is a mean of means: a rank
with one sample counts as much as one with a hundred. It is the same with sentences of different lengths, where the
tokens that count are the samples.

    what DDP makes of the losses lᵣ      ∇ Σ lᵣ / N              N ranks
    what one process would do            ∇ Σ sᵣ / Σ nᵣ           sᵣ, nᵣ: sum and number of rank r's samples
    so rank r's loss must be             lᵣ = N · sᵣ / Σ nᵣ
"""

from __future__ import annotations

from numbers import Integral

import torch

from course_lib.comm.communicator import Communicator


def weighted_loss(comm: Communicator, loss_sum: torch.Tensor, count: int) -> torch.Tensor:
    """This rank's loss: call `backward()` on it, and DDP's gradient is that of the mean over all ranks' samples.

    loss_sum: the losses of this rank's samples, *added up* (`reduction="sum"`): a scalar. A mean would not do: that of
        no sample is NaN, and no weight makes it good again. count: how many they are; 0 is fine. With gradients that
        add up over several backwards, give each the count of the whole step.

    The mean of the returned values over the ranks is the mean loss of all samples. Blocking: one all-reduce of one
    integer, on every rank, also on one with nothing to train on. Raises TypeError or ValueError for a count that is no
    number of samples, and for losses that have not been added up.
    """
    rank = comm.global_rank
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_floating_point():
        count = int(count)
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 0:
        raise TypeError(f"rank {rank}: count: expected a number of samples, 0 or more, got {count!r}")
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.dim() != 0:
        got = tuple(loss_sum.shape) if isinstance(loss_sum, torch.Tensor) else type(loss_sum).__name__
        raise ValueError(f'rank {rank}: loss_sum: expected a scalar, as reduction="sum" gives it, got {got}')
    total = torch.as_tensor(count, dtype=torch.int64, device=comm.device).clone()
    comm.all_reduce(total)
    return loss_sum * (
        comm.world_size / max(1, int(total))
    )  # one factor: N times a sum in float16 may overflow
